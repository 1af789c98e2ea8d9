"""The worker of a host, with the real store, forkserver and child processes: jobs that behave, and jobs that do not."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from torchstone.errors import SetupError
from torchstone.jobs import State, is_terminal
from torchstone.settings import Settings
from torchstone.specs import parse_spec
from torchstone.store import Store, artifacts, claims, events, hosts, jobs, leases, logs
from worker import processes
from worker.host import WorkerHost
from worker.launch import Launcher


def until(what: Callable[[], Any], within_s: float = 60) -> Any:
    """What `what` gives once it is true."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        value = what()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {within_s} s")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher(entry="tests.worker.misbehaving")
    launcher.warm_up()
    yield launcher
    launcher.close()


class Bed:
    """A worker host on a database, and what a client would do with it."""

    def __init__(self, url: str, folder: Path, launcher: Launcher) -> None:
        self.launcher = launcher
        self.settings = Settings(
            data=folder,
            database_url=url,
            host_name="bed",
            machine="bed",
            cpu_devices=min(2, len(os.sched_getaffinity(0))),
            poll_s=0.2,
            kill_grace_s=0.3,
            drain_s=0.5,
            log_limit_bytes=100_000,
            memory_limit_bytes=1 << 30,
        )
        self.store = Store(url)
        self.host: WorkerHost | None = None

    def open(self) -> WorkerHost:
        self.host = WorkerHost(self.settings, self.launcher)
        self.host.open()
        return self.host

    def shut(self) -> None:
        if self.host is not None:
            self.host.close_but_launcher()
            self.host = None

    def submit(self, name: str, **more: Any) -> str:
        spec = parse_spec({"kind": "jit", "model": {"preset": "mlp"}, "name": name, **more})
        with self.store.write() as conn:
            [stored] = jobs.insert_many(conn, [jobs.NewJob.of(spec)])
        return stored.job_id

    def job(self, job_id: str) -> dict[str, Any]:
        with self.store.read() as conn:
            row = jobs.get(conn, job_id)
        assert row is not None
        return {**row, "error": orjson.loads(row["error"] or "null"), "result": orjson.loads(row["result"] or "null")}

    def ended(self, job_id: str, within_s: float = 60) -> dict[str, Any]:
        until(lambda: is_terminal(self.job(job_id)["state"]), within_s)
        return self.job(job_id)

    def log(self, job_id: str) -> str:
        with self.store.read() as conn:
            return "".join(text for _, _, text in logs.read(conn, job_id))

    def pids(self, job_id: str) -> list[int]:
        """The processes that a `breed` job said it left, once it has said so."""
        until(lambda: "pids" in self.log(job_id) and self.log(job_id).endswith("\n"))
        line = next(line for line in self.log(job_id).splitlines() if line.startswith("pids"))
        return [int(word) for word in line.split()[1:]]


@pytest.fixture
def bed(database_url: str, tmp_path: Path, launcher: Launcher) -> Iterator[Bed]:
    bed = Bed(database_url, tmp_path, launcher)
    yield bed
    bed.shut()
    bed.store.dispose()


def test_a_job_runs_in_its_own_process_on_its_own_cores(bed: Bed) -> None:
    host = bed.open()
    job_id = bed.submit("answer forty-two")
    job = bed.ended(job_id)
    assert job["state"] == "succeeded"
    assert [a["outcome"] for a in job["attempts"]] == ["succeeded"]
    facts = job["result"]["environment"]["hosts"][0]
    [device] = job["attempts"][0]["devices"]
    assert facts == {
        "cores": list(host.devices[device].cores),
        "session": True,
        "secrets": [],
        "cuda": "",
        "folder": True,
    }
    assert job["result"]["figures"][0]["value"] is None
    assert job["result"]["figures"][0]["non_finite"] == ["value"]
    [artifact] = job["result"]["artifacts"]
    with bed.store.read() as conn:
        row = artifacts.named(conn, job_id, "words.txt")
        history = [(e["type"], orjson.loads(e["data"])) for e in events.after(conn, job_id, 0)]
    assert row is not None and row["sha256"] == artifact["sha256"] and row["bytes"] == 9
    assert [data["state"] for kind, data in history if kind == "state"] == ["queued", "running", "succeeded"]
    assert "this is answer" in bed.log(job_id)
    until(lambda: not any(bed.host.work.glob("*/")))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("segfault", "process_died", "SIGSEGV"),
        ("exit 0", "process_died", "exit code 0 and no result"),
        ("exit 7", "process_died", "exit code 7"),
        ("kill", "process_died", "SIGKILL"),
        ("raise", "workload_error", "ZeroDivisionError: the experiment's own mistake"),
        ("lie", "artifact_failed", "never.bin"),
        ("eat", "out_of_memory", "memory"),
    ],
)
def test_a_job_that_fails_says_why_and_the_next_one_runs(bed: Bed, name: str, code: str, words: str) -> None:
    bed.open()
    failing, next_one = bed.submit(name), bed.submit("answer")
    job = bed.ended(failing)
    assert (job["state"], job["error"]["code"]) == ("failed", code)
    assert words in job["error"]["message"]
    assert len(job["attempts"]) == 1, "a workload's own error is not tried again"
    assert bed.ended(next_one)["state"] == "succeeded"


def test_what_went_wrong_first_is_told_though_files_cannot_be_stored_either(bed: Bed) -> None:
    bed.open()
    job = bed.ended(bed.submit("lie_and_raise"))
    assert job["error"]["code"] == "workload_error"
    assert "ZeroDivisionError" in job["error"]["message"] and "never.bin" in job["error"]["message"]


def test_memory_that_ran_out_elsewhere_on_the_machine_is_no_reason(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts what it ended for want of memory by the machine, not by the job."""
    counts = itertools.count()
    monkeypatch.setattr(processes, "oom_kills", lambda: next(counts))
    bed.open()
    assert bed.ended(bed.submit("exit 3"))["error"]["code"] == "process_died"
    assert bed.ended(bed.submit("kill"))["error"]["code"] == "out_of_memory"


def test_memory_is_counted_where_the_kernel_does_not_tell_of_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    pids, read_text = [os.getpid()], Path.read_text

    def older(self: Path, *args: Any, **options: Any) -> str:
        text = read_text(self, *args, **options)
        return "".join(line for line in text.splitlines(True) if not line.startswith(("Pss_", "SwapPss")))

    monkeypatch.setattr(Path, "read_text", older)
    assert "Pss_Anon" not in Path("/proc/self/smaps_rollup").read_text()
    assert processes.proportional_bytes(pids) == pytest.approx(processes.private_bytes(pids), rel=0.1)


def test_what_a_job_prints_is_cut_and_counted(bed: Bed) -> None:
    bed.open()
    job_id = bed.submit("shout 20")
    assert bed.ended(job_id)["state"] == "succeeded"
    log = bed.log(job_id)
    assert "\ufffd\ufffd not text" in log
    assert "[output over 100000 bytes is not kept: " in log
    assert len(log) < 101_000


@pytest.mark.parametrize("name", ["wait", "breed", "deaf"])
def test_cancel_leaves_no_process_and_frees_the_devices(bed: Bed, name: str) -> None:
    # Given a running job, some with children in sessions of their own
    host = bed.open()
    job_id = bed.submit(name)
    pids = bed.pids(job_id) if name != "wait" else []
    until(lambda: bed.job(job_id)["progress"])
    # When it is cancelled
    with bed.store.write() as conn:
        assert jobs.cancel(conn, job_id) == "canceling"
    # Then it ends as canceled, with all that it started, and the next job runs
    assert bed.ended(job_id, within_s=15)["state"] == "canceled"
    assert not [pid for pid in pids if processes.is_alive(pid)]
    with bed.store.read() as conn:
        killed = [e for e in events.after(conn, job_id, 0) if e["type"] == "killed"]
    receipt = orjson.loads(killed[0]["data"])
    assert receipt["reason"] == "canceled" and set(pids) <= set(receipt["pids"])
    assert receipt["killed"] == (name != "wait") and receipt["memory_back_bytes"] > 0
    assert bed.job(job_id)["attempts"][0]["receipt"] == receipt
    assert bed.ended(bed.submit("answer"))["state"] == "succeeded"
    until(lambda: host.free() == (0, len(host.devices)))


def test_children_left_behind_by_a_job_that_ended_well_are_ended(bed: Bed) -> None:
    bed.open()
    job_id = bed.submit("breed_and_end")
    assert bed.ended(job_id)["state"] == "succeeded"
    pids = bed.pids(job_id)
    assert len(pids) == 3
    until(lambda: not [pid for pid in pids if processes.is_alive(pid)], 10)


def test_a_job_that_takes_too_long_is_timed_out(bed: Bed) -> None:
    bed.open()
    job = bed.ended(bed.submit("wait", timeout_s=0.5))
    assert job["error"] == {"code": "timed_out", "message": "the job ran for longer than its timeout_s of 0.5 s"}


def test_jobs_run_side_by_side_only_where_isolation_allows(bed: Bed, tmp_path: Path) -> None:
    # Given a host of two devices
    host = bed.open()
    if len(host.devices) < 2:
        pytest.skip("needs two cores")
    gate = tmp_path / "gate"
    # When two jobs share it, and one that wants it for itself comes third
    shared = [bed.submit(f"wait_for {gate}", isolation="device") for _ in range(2)]
    alone = bed.submit(f"wait_for {gate}")
    # Then the first two run at once on different devices, and the third waits for both
    until(lambda: all(bed.job(job_id)["state"] == "running" for job_id in shared))
    taken = [bed.job(job_id)["attempts"][0]["devices"] for job_id in shared]
    assert sorted(map(tuple, taken)) == [("cpu:0",), ("cpu:1",)]
    with bed.store.read() as conn:
        [item] = hosts.inventory(conn, 30)
    assert {d["held_by"]["job"] for d in item["devices"]} == set(shared)
    # (and the results of these two name each other, that of the third nobody)
    assert bed.job(alone)["state"] == "queued"
    gate.touch()
    assert bed.ended(alone)["state"] == "succeeded"
    finished = max(bed.job(job_id)["finished_us"] for job_id in shared)
    assert bed.job(alone)["started_us"] >= finished
    for job_id, beside in zip(shared, reversed(shared), strict=True):
        quality = bed.job(job_id)["result"]["quality"]
        assert quality["grade"] == "suspect"
        [code] = [code for code in quality["codes"] if code["code"] == "neighbours"]
        assert [job["job"] for job in code["evidence"]["jobs"]] == [beside]
    assert bed.job(alone)["result"]["quality"] == {"grade": "valid", "codes": []}


def test_a_worker_that_lost_its_claim_ends_the_job_and_writes_nothing(bed: Bed) -> None:
    # Given a running job
    host = bed.open()
    job_id = bed.submit("wait")
    until(lambda: bed.job(job_id)["progress"])
    [run] = host.runs()
    # When the job is taken away, as if the lease had run out while this worker slept
    with bed.store.write() as conn:
        assert leases.give_back(conn, run.claim.holder, "taken away", spent=True, max_attempts=1) == State.failed
    # Then its process ends, and nothing that it says counts any more
    until(lambda: not host.runs(), 15)
    job = bed.job(job_id)
    assert (job["state"], job["error"]["code"]) == ("failed", "worker_lost")


def test_a_stopping_worker_hands_its_jobs_back_unspent(bed: Bed) -> None:
    # Given a running job and one that waits
    host = bed.open()
    running = bed.submit("wait")
    until(lambda: bed.job(running)["progress"])
    # When the worker is asked to stop
    host.drain()
    # Then the job is queued again, no attempt is spent, and another worker takes it
    job = bed.job(running)
    assert (job["state"], job["lost"]) == ("queued", 0)
    assert [a["outcome"] for a in job["attempts"]] == ["returned"]
    bed.shut()
    bed.open()
    until(lambda: bed.job(running)["attempt"] == 2 and bed.job(running)["state"] == "running")


def test_a_stopping_worker_lets_short_jobs_end(bed: Bed, tmp_path: Path) -> None:
    host = bed.open()
    gate = tmp_path / "gate"
    job_id = bed.submit(f"wait_for {gate}")
    until(lambda: "this is wait_for" in bed.log(job_id))
    stopping = threading.Thread(target=host.drain)
    stopping.start()
    until(lambda: host._draining)
    late = bed.submit("answer")
    gate.touch()
    stopping.join(30)
    assert [a["outcome"] for a in bed.job(job_id)["attempts"]] == ["succeeded"]
    assert bed.job(late)["state"] == "queued", "it takes no more"


def test_a_result_that_is_there_when_the_worker_stops_is_recorded(bed: Bed) -> None:
    # Given a job that has answered, and whose process does not end
    bed.settings = bed.settings.model_copy(update={"drain_s": 3.0})
    host = bed.open()
    job_id = bed.submit("answer_and_stay")
    until(lambda: "this is answer_and_stay" in bed.log(job_id))
    # When the worker is asked to stop, and waits for it in vain
    host.drain()
    # Then it is not made again
    assert [a["outcome"] for a in bed.job(job_id)["attempts"]] == ["succeeded"]


def test_a_job_ends_itself_when_its_worker_gives_no_sign_of_life(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a running job, and a worker that renews its leases and does not say so, as if it stood still
    bed.settings = bed.settings.model_copy(update={"heartbeat_s": 0.2, "fence_s": 1.0, "lease_s": 3.0})
    host = bed.open()
    monkeypatch.setattr(host._alive, "say", lambda now_s: None)
    job_id = bed.submit("deaf")
    pids = bed.pids(job_id)
    # Then the job is ended by its own process, with all that it started, and is made again
    until(lambda: bed.job(job_id)["attempt"] == 2, 20)
    [first, *_] = bed.job(job_id)["attempts"]
    assert (first["outcome"], first["reason"]) == ("lost", "its worker was not heard of, so it ended itself")
    assert not [pid for pid in pids if processes.is_alive(pid)]


def test_devices_stay_taken_until_no_process_is_left(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stuck in the kernel takes no SIGKILL for a while; that is the one thing that is played here."""
    host = bed.open()
    stuck, released = processes.end_group, threading.Event()

    def end_group(leader: int, grace_s: float, also: list[int] | None = None) -> processes.Receipt:
        receipt = stuck(leader, grace_s, also)
        if grace_s > 0 or also == [4_000_000]:
            receipt.survivors = [] if released.wait(0.1) else [4_000_000]
        return receipt

    monkeypatch.setattr(processes, "end_group", end_group)
    job_id = bed.submit("wait")
    until(lambda: bed.job(job_id)["progress"])
    with bed.store.write() as conn:
        jobs.cancel(conn, job_id)
    until(lambda: not processes.descendants(host.launcher.server_pid or 0))
    time.sleep(0.5)
    assert bed.job(job_id)["state"] == "canceling"
    assert host.free() == (0, 0), "its devices are not given to anybody"
    released.set()
    assert bed.ended(job_id)["state"] == "canceled"


def test_two_workers_cannot_share_a_name(bed: Bed) -> None:
    bed.open()
    with pytest.raises(SetupError, match=f"already running here \\(pid {os.getpid()}\\)"):
        WorkerHost(bed.settings, bed.launcher).open()


def test_a_restarted_worker_takes_its_jobs_back_at_once(bed: Bed) -> None:
    # Given a job that an earlier run of this host claimed and never ended
    bed.submit("answer")
    ghost = hosts.Host("bed", "bed", "ghost", 1, 0.0, [{"name": "cpu:0", "type": "cpu"}], 1 << 30, {})
    with bed.store.write() as conn:
        hosts.register(conn, ghost)
        claim = claims.claim(conn, ghost, 3600)
    assert claim is not None
    # When the host comes up again, then the job is done in a second attempt, long before the lease ends
    bed.open()
    job = bed.ended(claim.holder.job_id)
    assert job["state"] == "succeeded"
    assert [a["outcome"] for a in job["attempts"]] == ["lost", "succeeded"]
    assert job["attempts"][0]["reason"] == "its worker was restarted"


def test_only_folders_of_jobs_are_cleared_away(bed: Bed, tmp_path: Path) -> None:
    work = tmp_path / "work" / "bed"
    kept, left_over = work / "somebody's", work / "01a229bf-0d78-7def-b5f8-ca8e6bc24525-1"
    for folder in (kept, left_over):
        folder.mkdir(parents=True)
    bed.open()
    assert kept.exists() and not left_over.exists()


def test_the_forkserver_may_die(bed: Bed) -> None:
    host = bed.open()
    assert bed.ended(bed.submit("answer"))["state"] == "succeeded"
    server = host.launcher.server_pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert bed.ended(bed.submit("answer"))["state"] == "succeeded"


def test_a_job_that_is_still_starting_is_cancelled_at_once(bed: Bed) -> None:
    # Given a forkserver that must import torch again before it can start anything
    host = bed.open()
    assert bed.ended(bed.submit("answer"))["state"] == "succeeded"
    assert host.launcher.server_pid is not None
    os.kill(host.launcher.server_pid, signal.SIGKILL)
    job_id = bed.submit("wait")
    until(lambda: bed.job(job_id)["state"] == "running")
    # When the job is cancelled meanwhile, then it ends without having run, and the next one runs
    with bed.store.write() as conn:
        jobs.cancel(conn, job_id)
    assert bed.ended(job_id)["state"] == "canceled"
    assert bed.log(job_id) == ""
    assert bed.ended(bed.submit("answer"))["state"] == "succeeded"


def test_the_forkserver_outlives_a_request_to_stop(bed: Bed) -> None:
    """Whoever stops the worker's whole process group must not end the jobs that it is about to hand back."""
    host = bed.open()
    job_id = bed.submit("wait")
    until(lambda: bed.job(job_id)["progress"])
    assert host.launcher.server_pid is not None
    os.kill(host.launcher.server_pid, signal.SIGTERM)
    host.drain()
    assert [a["outcome"] for a in bed.job(job_id)["attempts"]] == ["returned"]
