"""Faults at awkward moments, on the real worker: whatever happens, the job ends, the next one runs, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.worker.test_host import Bed, bed, launcher, until
from torchstone.settings import Settings
from torchstone.store import claims, jobs, migrate
from worker import processes
from worker.servers import COMPILER

__all__ = ["bed", "launcher"]  # fixtures


def cancel(bed: Bed, job_id: str) -> None:
    with bed.store.write() as conn:
        jobs.cancel(conn, job_id)


def test_a_job_whose_claim_nobody_heard_of_is_given_back(bed: Bed) -> None:
    # Given a claim that was committed, but whose answer never reached the worker
    host = bed.open()
    host._draining = True
    job_id = bed.submit("answer")
    with bed.store.write() as conn:
        assert claims.claim(conn, host.host, 3600) is not None
    host._draining = False
    # When the worker next renews its leases, then it finds that it does not run that job, and runs it
    job = bed.ended(job_id)
    assert [a["outcome"] for a in job["attempts"]] == ["lost", "succeeded"]


def test_a_job_whose_end_could_not_be_recorded_is_run_again(bed: Bed) -> None:
    # Given a database that refuses every end of an attempt, for a reason that does not pass by itself
    bed.open()
    if bed.store.is_sqlite:
        refuse = ["CREATE TRIGGER refuse BEFORE UPDATE ON attempts BEGIN SELECT RAISE(ABORT, 'no'); END"]
        allow = "DROP TRIGGER refuse"
    else:
        refuse = [
            "CREATE FUNCTION say_no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$",
            "CREATE TRIGGER refuse BEFORE UPDATE ON attempts FOR EACH ROW EXECUTE FUNCTION say_no()",
        ]
        allow = "DROP TRIGGER refuse ON attempts"
    with bed.store.write() as conn:
        for statement in refuse:
            conn.execute(text(statement))
    job_id = bed.submit("answer")
    until(lambda: "this is answer" in bed.log(job_id) or bed.job(job_id)["state"] == "running")
    assert bed.host is not None
    until(lambda: bed.host is not None and not bed.host.runs() and bed.job(job_id)["state"] == "running")
    # When the fault is gone
    with bed.store.write() as conn:
        conn.execute(text(allow))
    # Then the job ends after all, and so does the next
    job = bed.ended(job_id)
    assert [a["outcome"] for a in job["attempts"]] == ["lost", "succeeded"]
    assert bed.ended(bed.submit("answer"))["state"] == "succeeded"


def test_a_job_that_stopped_half_way_through_a_message_can_be_cancelled(bed: Bed) -> None:
    bed.open()
    job_id = bed.submit("stutter")
    until(lambda: bed.job(job_id)["progress"])
    cancel(bed, job_id)
    assert bed.ended(job_id, within_s=15)["state"] == "canceled"


def test_a_job_that_speaks_gibberish_ends(bed: Bed) -> None:
    bed.open()
    job = bed.ended(bed.submit("gibberish"))
    assert (job["state"], job["error"]["code"]) == ("failed", "process_died")


def test_a_job_that_answers_and_does_not_go_has_its_result_and_is_ended(bed: Bed) -> None:
    bed.open()
    job = bed.ended(bed.submit("answer_and_stay"))
    assert job["state"] == "succeeded"


def test_an_orphan_that_prints_for_ever_does_not_hold_the_job(bed: Bed) -> None:
    host = bed.open()
    job_id = bed.submit("leave_a_shouter")
    assert bed.ended(job_id, within_s=20)["state"] == "succeeded"
    assert host.launcher.server_pid is not None
    assert not processes.descendants(host.launcher.server_pid)


def test_a_job_that_dies_with_the_forkserver_is_run_again(bed: Bed) -> None:
    host = bed.open()
    job_id = bed.submit("wait")
    until(lambda: bed.job(job_id)["progress"])
    server = host.launcher.server_pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    until(lambda: bed.job(job_id)["attempt"] == 2 and bed.job(job_id)["progress"])
    [first, _] = bed.job(job_id)["attempts"]
    assert (first["outcome"], first["reason"]) == ("lost", "the forkserver died, and the job's process with it")
    cancel(bed, job_id)
    bed.ended(job_id)


def test_a_forkserver_that_hangs_is_replaced(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    host = bed.open()
    assert bed.ended(bed.submit("answer"))["state"] == "succeeded"
    server = host.launcher.server_pid
    assert server is not None
    monkeypatch.setattr(host.launcher, "start_within_s", 1.0)
    os.kill(server, signal.SIGSTOP)
    job_id = bed.submit("answer")
    until(lambda: not processes.is_alive(server))
    monkeypatch.undo()
    job = bed.ended(job_id)
    assert job["state"] == "succeeded"
    assert "did not start the job's process within 1 s" in job["attempts"][0]["reason"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two devices")
def test_a_forkserver_that_hangs_holds_up_only_its_own_jobs(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a job that runs, and one that waits for a forkserver that hangs while it imports the compiler
    host = bed.open()
    shared = {"isolation": "device"}
    stays = bed.submit("wait", **shared)
    until(lambda: bed.job(stays)["progress"])
    hangs = bed.submit("answer", variants=["eager", "compile"], **shared)

    def living() -> int | None:
        pid = host.launcher._servers.pid(COMPILER)
        return pid if pid and processes.is_alive(pid) else None

    server = until(living)
    os.kill(server, signal.SIGSTOP)
    # When it is cancelled, then its device is free at once for a job that needs no compiler, and the first one goes on
    cancel(bed, hangs)
    assert bed.ended(hangs, within_s=10)["state"] == "canceled"
    monkeypatch.setattr(host.launcher, "start_within_s", 5.0)
    job = bed.ended(bed.submit("answer", **shared), within_s=20)
    assert (job["state"], job["attempt"], bed.job(stays)["attempt"]) == ("succeeded", 1, 1)
    assert processes.is_alive(server)
    processes.end_group(server, grace_s=0)
    cancel(bed, stays)
    assert bed.ended(stays)["state"] == "canceled"


def test_a_process_that_nobody_can_watch_is_ended(bed: Bed, tmp_path: Path) -> None:
    """As on a full disk: the leader cannot be noted down, so the job must not go on unseen."""
    host = bed.open()
    bed.submit("wait")
    until(lambda: host.runs() and host.runs()[0]._process)
    assignment = host.runs()[0]._assignment()
    missing = type(assignment)(**{**vars(assignment), "folder": str(tmp_path / "missing")})
    assert host.launcher.server_pid is not None
    before = set(processes.descendants(host.launcher.server_pid))
    with pytest.raises(FileNotFoundError):
        host.launcher.start(missing)
    until(lambda: set(processes.descendants(host.launcher.server_pid or 0)) <= before)


def test_a_temporary_folder_that_is_too_long_is_refused_before_a_job_is_lost(tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 120)
    too_long.mkdir()
    settings = Settings(data=tmp_path, cpu_devices=1)
    migrate(settings.database_url)
    environment = {**os.environ, **settings.environment(), "TMPDIR": str(too_long)}
    run = subprocess.run(
        [sys.executable, "-m", "worker"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 2 and "set TMPDIR to a shorter path" in run.stderr
    assert "registered" not in run.stderr and "Traceback" not in run.stderr
