"""Faults that take a fleet of their own: a host that vanishes, a PostgreSQL that goes away, a rank that dies."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import postgresql_server
from tests.faults.stand import Stand, standing
from tests.faults.test_faults import RUNS, pytestmark
from tests.running import PROGRAM
from tests.torchstone.processes import wait_until
from torchstone.errors import Unavailable

__all__ = ["pytestmark"]

TRAIN = {
    "kind": "train",
    "model": {"preset": "mlp"},
    "dataset": {"name": "digits"},
    "strategies": ["ddp"],
    "devices": {"type": "cpu", "count": 2},
    "epochs": 10_000,
    "batch_size": 100,
    "rank_timeout_s": 3,
}


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A Torchstone on a PostgreSQL of its own, which can be stopped."""
    with postgresql_server() as server:
        with server.connect("postgres") as connection:
            connection.execute("CREATE DATABASE torchstone")
            # The tests' server is quick and forgetful; what this one has acknowledged must outlive it.
            connection.execute("ALTER DATABASE torchstone SET synchronous_commit = on")
        folder = tmp_path_factory.mktemp("outages")
        with standing(folder / "d", TORCHSTONE_DATABASE_URL=server.url("torchstone")) as stand:
            stand.server = server
            yield stand


@contextlib.contextmanager
def second_host(stand: Stand) -> Iterator[psutil.Process]:
    """`torchstone worker` under a name and on a machine of its own; its supervisor."""
    log = stand.data / "second.log"
    environment = {
        **stand.up.mark.environment,
        **stand.environment,
        "TORCHSTONE_HOST_NAME": "second",
        "TORCHSTONE_MACHINE": "second",
        "TORCHSTONE_WORK": str(stand.data / "second"),
    }
    with log.open("wb") as out:
        argv = [*PROGRAM, "worker", "--data", str(stand.data)]
        worker = subprocess.Popen(argv, env=environment, stdout=out, stderr=subprocess.STDOUT)
    stand.roots = [worker.pid]
    try:
        wait_until(lambda: "is ready" in log.read_text(), 60, log.read_text)
        yield psutil.Process(worker.pid)
    finally:
        if worker.poll() is None:
            worker.terminate()
        worker.wait(30)


def everything_below(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


@pytest.mark.parametrize("run", range(RUNS))
def test_a_host_that_vanishes_is_noticed_and_its_jobs_run_elsewhere(stand: Stand, run: int) -> None:
    with second_host(stand) as worker:
        # Given two workers that claimed at once whatever was in the queue, each job once
        short = [stand.submit() for _ in range(20)]
        for job in stand.settle(short):
            assert job["state"] == "succeeded" and len(job["attempts"]) == 1
        # And a job on each device of both
        job_ids = [stand.running(seconds=4) for _ in range(4)]
        there = [job_id for job_id in job_ids if stand.job(job_id)["attempts"][0]["host"] == "second"]
        assert len(there) == 2
        # When one host is gone from one moment to the next
        begin_s = time.monotonic()
        for process in everything_below(worker):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # Then its jobs are done on the other, and the others' are not touched
        jobs = stand.settle(job_ids)
    print(f"a host vanished: recovered in {time.monotonic() - begin_s:.1f} s")
    assert {job["state"] for job in jobs} == {"succeeded"}
    for job in jobs:
        hosts = [attempt["host"] for attempt in job["attempts"]]
        assert hosts == (["second", "first"] if job["id"] in there else ["first"])


@pytest.mark.parametrize("away_s", [0.0, 8.0][-RUNS:])
@pytest.mark.parametrize("run", range(RUNS))
def test_a_database_that_is_restarted_or_away_loses_nothing(stand: Stand, away_s: float, run: int) -> None:
    # Given a running job and one that waits
    job_id, waiting = stand.running(seconds=2), stand.submit()
    begin_s = time.monotonic()
    # When the server ends with every connection, and comes back at once or after leases have run out
    assert stand.server is not None
    stand.server.stop()
    refused = 0
    while time.monotonic() < begin_s + away_s:
        with contextlib.suppress(Unavailable):
            stand.client.submit({"kind": "sleep"})
            raise AssertionError("nothing can be stored now")
        refused += 1
        time.sleep(0.2)
    stand.server.start()
    assert refused or not away_s
    # Then both succeed, and no attempt was spent on it
    jobs = stand.settle([job_id, waiting])
    print(f"a database away for {away_s:g} s: recovered in {time.monotonic() - begin_s:.1f} s")
    assert [job["state"] for job in jobs] == ["succeeded", "succeeded"]
    for job in jobs:
        assert {attempt["outcome"] for attempt in job["attempts"]} <= {"returned", "succeeded"}


@pytest.mark.parametrize("name", ["SIGSTOP", "SIGKILL"][-RUNS:])  # tests/worker/parallel has both, in every run
@pytest.mark.parametrize("run", range(RUNS))
def test_a_rank_that_dies_or_stands_still_ends_its_job(stand: Stand, name: str, run: int) -> None:
    job_id = stand.client.submit(TRAIN)["id"]

    def rank() -> psutil.Process | None:
        for leader in stand.job_processes():
            for process in leader.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if process.name() == "ts ddp:1":
                        return process
        return None

    wait_until(lambda: rank() and "ddp, step" in str(stand.job(job_id)["progress"]), 60, lambda: str(stand.job(job_id)))
    found = rank()
    assert found is not None
    begin_s = time.monotonic()
    found.send_signal(signal.Signals[name])
    [job] = stand.settle([job_id])
    print(f"{name} of a rank: recovered in {time.monotonic() - begin_s:.1f} s")
    assert job["error"]["code"] == "rank_lost" and job["error"]["rank"] == 1
