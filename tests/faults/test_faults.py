"""Break every part of a running Torchstone: whatever dies, each job ends once, with its result or a true reason.

    pytest tests/faults -s                              # one run of each, and the times to recover
    TORCHSTONE_FAULT_RUNS=20 pytest tests/faults -s     # the full proof

One `torchstone up` with real parts stands through all of them. After each fault `Stand.settle` asks that every job has
ended, that none ran twice (the jobs notice it themselves), that no process and no lease is left, and that the next job
succeeds. "Recovered" is the time from the fault until all that holds, the time that the jobs themselves run included.
Leases are 6 s here, not 30.
"""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from tests.faults.stand import LEASE_S, MEMORY_BYTES, Stand, standing
from tests.torchstone.processes import wait_until
from torchstone.client import Client
from torchstone.errors import Conflict
from torchstone.queue import TASK, celery_app

RUNS = int(os.environ.get("TORCHSTONE_FAULT_RUNS", "1"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="uses Linux' ways of ending processes"),
]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder = tmp_path_factory.mktemp("stand")
    variables = {"TORCHSTONE_MEMORY_LIMIT_BYTES": str(MEMORY_BYTES)} | _clock(folder)
    with standing(folder / "d", **variables) as stand:
        yield stand


def _clock(folder: Path) -> dict[str, str]:
    """A clock that can be set, for everything that is started; nothing where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    (folder / "offset").write_text("0")
    return {"LD_PRELOAD": str(library), "TORCHSTONE_TEST_CLOCK": str(folder / "offset")}


# -- jobs that misbehave ----------------------------------------------------------------------------------------


def forks(stand: Stand) -> None:
    [job] = stand.settle([stand.submit(behavior="fork")])
    assert job["state"] == "succeeded"


def forks_and_is_cancelled(stand: Stand) -> None:
    job_id = stand.running(seconds=60, behavior="fork")
    stand.client.cancel(job_id)
    [job] = stand.settle([job_id])
    receipt = job["attempts"][0]["receipt"]
    assert job["state"] == "canceled" and len(receipt["pids"]) >= 3 and receipt["memory_back_bytes"] > 0


def ignores_term(stand: Stand) -> None:
    job_id = stand.running(seconds=60, behavior="deaf")
    stand.client.cancel(job_id)
    [job] = stand.settle([job_id])
    receipt = job["attempts"][0]["receipt"]
    assert job["state"] == "canceled" and receipt["killed"] and receipt["took_ms"] >= 500
    with pytest.raises(Conflict):
        stand.client.cancel(job_id)


def prints_a_lot(stand: Stand) -> None:
    megabytes = 1000 if RUNS > 1 else 50
    job_id = stand.submit(behavior="shout", megabytes=megabytes)
    [job] = stand.settle([job_id], within_s=120)
    assert job["state"] == "succeeded"
    log = "".join(stand.client.logs(job_id))
    assert len(log) < 5_000_000 and "is not kept" in log


def leaks_memory(stand: Stand) -> None:
    [job] = stand.settle([stand.submit(behavior="leak")])
    assert job["error"]["code"] == "out_of_memory" and len(job["attempts"]) == 1


def segfaults(stand: Stand) -> None:
    [job] = stand.settle([stand.submit(behavior="segfault")])
    assert job["error"]["code"] == "process_died" and "SIGSEGV" in job["error"]["message"]
    assert len(job["attempts"]) == 1, "a job's own fault is not tried again"


def calls_exit(stand: Stand) -> None:
    [job] = stand.settle([stand.submit(behavior="exit")])
    assert job["error"]["code"] == "process_died" and "exit code 3" in job["error"]["message"]


def takes_too_long(stand: Stand) -> None:
    [job] = stand.settle([stand.submit(seconds=60, timeout_s=1)])
    assert job["error"]["code"] == "timed_out" and job["attempts"][0]["receipt"]["reason"] == "timed_out"


def is_killed(stand: Stand) -> None:
    job_id = stand.running(seconds=60)
    [process] = stand.job_processes()
    process.kill()
    [job] = stand.settle([job_id])
    assert job["error"]["code"] == "process_died" and "SIGKILL" in job["error"]["message"]


def is_not_started_in_time(stand: Stand) -> None:
    blocking = stand.running(seconds=2, devices={"type": "cpu", "count": 2})
    late = stand.submit(start_within_s=0.5)
    assert "waits for 1 cpu device; held by" in stand.job(late)["waiting_for"]["reason"]
    first, second = stand.settle([blocking, late])
    assert (first["state"], second["state"], second["attempts"]) == ("succeeded", "expired", [])


def fills_the_disk(stand: Stand) -> None:
    """The worker may write no file of more than 16 MB: to it the disk is full in the middle of an artifact."""
    worker = stand.up.part("worker").pid
    artifacts = stand.data / "artifacts"
    unlimited = resource.prlimit(worker, resource.RLIMIT_FSIZE, (16 << 20, resource.RLIM_INFINITY))
    try:
        job_id = stand.submit(behavior="write", megabytes=24)
        wait_until(lambda: stand.job(job_id)["state"] == "failed", 40, lambda: str(stand.job(job_id)))
    finally:
        resource.prlimit(worker, resource.RLIMIT_FSIZE, unlimited)
    [job] = stand.settle([job_id])
    assert job["error"]["code"] == "artifact_failed" and "bytes.bin" in job["error"]["message"]
    assert not [path for path in artifacts.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
    [job] = stand.settle([stand.submit(behavior="write", megabytes=1)])
    assert job["state"] == "succeeded" and stand.client.artifacts(job["id"])[0]["bytes"] == 1_000_000


# -- parts that die ---------------------------------------------------------------------------------------------


def api_is_killed(stand: Stand) -> None:
    """While clients submit: what was accepted is there, and what was tried again under its key is there once."""
    accepted: list[str] = []

    def submit_some() -> None:
        with Client(stand.up.url) as client:
            for number in range(10):
                accepted.append(Stand(stand.up, client, stand.data, {}).submit(name=f"api {number}"))

    clients = [threading.Thread(target=submit_some) for _ in range(2)]
    for client in clients:
        client.start()
    wait_until(lambda: accepted, 20)
    stand.up.part("service").kill()
    for client in clients:
        client.join(60)
    assert len(set(accepted)) == 20
    jobs = stand.settle(accepted)
    assert {job["state"] for job in jobs} == {"succeeded"}


def worker_is_killed(stand: Stand) -> None:
    job_id = stand.running(seconds=2)
    waiting = stand.submit()
    stand.up.part("worker").kill()
    jobs = stand.settle([job_id, waiting])
    assert [job["state"] for job in jobs] == ["succeeded", "succeeded"]
    lost, _ = jobs[0]["attempts"]
    assert (lost["outcome"], lost["reason"]) == ("lost", "its worker was restarted")


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def suspend_between_writes(stand: Stand, worker: psutil.Process) -> None:
    """Amid a write it would keep SQLite's only lock, and nobody could take its job back until it wakes up."""
    while True:
        worker.suspend()
        database = sqlite3.connect(stand.data / "torchstone.db", isolation_level=None, timeout=0.5)
        try:
            database.execute("BEGIN IMMEDIATE")
            database.rollback()
            return
        except sqlite3.OperationalError:
            worker.resume()
        finally:
            database.close()


def worker_is_stopped_for_longer_than_its_lease(stand: Stand) -> None:
    """It wakes up, finds that it lost its claim, and the job's process has ended by itself by then."""
    job_id = stand.running(seconds=LEASE_S + 6)
    worker = stand.up.part("worker")
    [process] = stand.job_processes()
    suspend_between_writes(stand, worker)
    try:
        wait_until(lambda: has_ended(process), LEASE_S + 1)
        stand.wait_for_state(job_id, "queued", within_s=LEASE_S + 20)
    finally:
        worker.resume()
    stand.wait_for_state(job_id, "running")
    stand.client.cancel(job_id)  # it has shown what it had to
    [job] = stand.settle([job_id])
    assert [attempt["outcome"] for attempt in job["attempts"]] == ["lost", "canceled"]
    assert stand.up.part("worker").pid == worker.pid


def broker_is_killed(stand: Stand) -> None:
    """Amid a job, with a free device and with messages on their way: the same worker goes on (kombu 5.7.0 ends one
    that holds a message then)."""
    job_id = stand.running(seconds=2)
    worker = stand.up.part("worker").pid
    waiting = [stand.submit() for _ in range(3)]
    stand.up.part("valkey-server").kill()
    waiting += [stand.submit() for _ in range(3)]
    jobs = stand.settle([job_id, *waiting])
    assert {job["state"] for job in jobs} == {"succeeded"} and {len(job["attempts"]) for job in jobs} == {1}
    assert stand.up.part("worker").pid == worker


def broker_comes_back_empty(stand: Stand) -> None:
    blocking = stand.running(seconds=1.5, devices={"type": "cpu", "count": 2})
    waiting = [stand.submit() for _ in range(3)]
    server = redis.Redis(unix_socket_path=str(stand.settings().broker_socket))
    server.flushall()
    server.close()
    stand.up.part("valkey-server").kill()
    assert {job["state"] for job in stand.settle([blocking, *waiting])} == {"succeeded"}


def broker_does_not_answer(stand: Stand) -> None:
    """Its process is there and says nothing: jobs are accepted at once and run, because workers look by themselves."""
    broker = stand.up.part("valkey-server")
    broker.suspend()
    try:
        begin_s = time.monotonic()
        job_ids = [stand.submit() for _ in range(3)]
        assert time.monotonic() - begin_s < 15
        for job_id in job_ids:
            stand.wait_for_state(job_id, "succeeded")
    finally:
        broker.resume()
    assert {len(job["attempts"]) for job in stand.settle(job_ids)} == {1}


def bells_ring_too_often(stand: Stand) -> None:
    """The message of a job is delivered many times over: it is started once."""
    blocking = stand.running(seconds=1, devices={"type": "cpu", "count": 2})
    job_ids = [stand.submit(seconds=0.2) for _ in range(3)]
    app = celery_app(stand.settings())
    with app.connection_for_write() as connection:
        for queue in ["cpu.k1"] * 10 + ["cpu.k2"] * 3:
            app.send_task(TASK, queue=queue, connection=connection)
    app.close()
    jobs = stand.settle([blocking, *job_ids])
    assert {job["state"] for job in jobs} == {"succeeded"} and {len(job["attempts"]) for job in jobs} == {1}


# -- the database and the clock ---------------------------------------------------------------------------------


def database_is_locked(stand: Stand) -> None:
    """For longer than a worker may go on without renewing: it ends its job, which does not pay for it."""
    job_id = stand.running(seconds=60)
    lock = sqlite3.connect(stand.data / "torchstone.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    try:
        wait_until(lambda: not stand.job_processes(), 20)
        assert stand.job(job_id)["state"] == "running", "reading goes on"
    finally:
        lock.rollback()
        lock.close()
    stand.wait_for_state(job_id, "running")
    wait_until(lambda: len(stand.job(job_id)["attempts"]) == 2, 20, lambda: str(stand.job(job_id)))
    stand.client.cancel(job_id)
    [job] = stand.settle([job_id])
    first = job["attempts"][0]
    assert (first["outcome"], first["reason"]) == ("returned", "the database was out of reach")


def clock_is_set(stand: Stand, by_s: int) -> None:
    """An hour forth or back, amid a job: nobody takes that for silence."""
    offset = stand.environment.get("TORCHSTONE_TEST_CLOCK")
    if offset is None:
        pytest.skip("there is no C compiler to make a clock that can be set")
    job_id = stand.running(seconds=2)
    Path(offset).write_text(str(int(Path(offset).read_text()) + by_s))
    [job] = stand.settle([job_id])
    assert job["state"] == "succeeded" and len(job["attempts"]) == 1


def clock_is_set_forth(stand: Stand) -> None:
    clock_is_set(stand, 3600)


def clock_is_set_back(stand: Stand) -> None:
    clock_is_set(stand, -3600)


FAULTS: list[Callable[[Stand], None]] = [
    forks,
    forks_and_is_cancelled,
    ignores_term,
    prints_a_lot,
    leaks_memory,
    segfaults,
    calls_exit,
    takes_too_long,
    is_killed,
    is_not_started_in_time,
    fills_the_disk,
    api_is_killed,
    worker_is_killed,
    worker_is_stopped_for_longer_than_its_lease,
    broker_is_killed,
    broker_comes_back_empty,
    broker_does_not_answer,
    bells_ring_too_often,
    database_is_locked,
    clock_is_set_forth,
    clock_is_set_back,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("run", range(RUNS))
def test_whatever_breaks_every_job_ends_once(stand: Stand, fault: Callable[[Stand], None], run: int) -> None:
    stand.wait_until_whole()
    begin_s = time.monotonic()
    fault(stand)
    print(f"{fault.__name__}: recovered in {time.monotonic() - begin_s:.1f} s")
