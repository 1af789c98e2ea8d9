"""A contestant that cannot answer any more is noticed, and one that works is left alone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.torchstone.processes import wait_until
from tests.worker.fresh import call_fresh
from torchstone.errors import ProcessDied
from worker import processes
from worker.concurrency.crew import Crew
from worker.measure import contestant
from worker.measure.contestant import Contestant, ContestantFailed

CORES = (min(os.sched_getaffinity(0)),)


class Worker:
    """Works, or stands still."""

    def work(self, seconds: float) -> int:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            pass
        return os.getpid()

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def wait(self) -> None:
        signal.pause()

    def delegate(self) -> int:
        """The work is done by a child."""
        child = os.fork()
        if child == 0:
            self.work(4.5)
            os._exit(0)
        return os.waitpid(child, 0)[1]


def asked(request: str, **arguments: float) -> object:
    with mock.patch.object(contestant, "STILL_LOOKS", 2):
        started = Contestant.start("one", Worker, CORES, 1)
        try:
            return started.ask(request, **arguments)
        except ContestantFailed as failure:
            return failure.kind, failure.reason
        finally:
            started.close()


@pytest.mark.parametrize(("request_", "words"), [("stop", "it is stopped by a signal"), ("wait", "waits for no disk")])
def test_one_that_stands_still_is_ended(request_: str, words: str) -> None:
    kind, reason = call_fresh(asked, request_)
    assert kind == "died" and "took no processor time for 2 s" in reason and words in reason


def test_one_that_works_is_waited_for_also_where_a_child_does_it() -> None:
    assert call_fresh(asked, "work", seconds=4.5) > 0
    assert call_fresh(asked, "delegate") == 0


def _crew_with_one_that_stops() -> None:
    with mock.patch.object(contestant, "STILL_LOOKS", 2), Crew() as crew:
        for name in ("a", "b"):
            crew.start(name, Worker, CORES, 1)
        crew.ask_each([("a", "work", {"seconds": 0.1}), ("b", "stop", {})])


def test_a_crew_ends_with_one_that_stands_still() -> None:
    with pytest.raises(ProcessDied, match=r"b: its process \d+ took no processor time"):
        call_fresh(_crew_with_one_that_stops)


def _killed() -> tuple[str, str]:
    started = Contestant.start("one", Worker, CORES, 1)
    os.kill(started.pid, signal.SIGKILL)
    try:
        started.ask("work", seconds=0)
    except ContestantFailed as failure:
        return failure.kind, failure.reason
    raise AssertionError("it answered")


def test_a_kill_is_for_memory_only_where_the_kernel_killed_for_it() -> None:
    if processes.oom_kills() is None:
        pytest.skip("this kernel does not tell how often it killed for memory")
    assert call_fresh(_killed) == ("died", "its process was killed by SIGKILL")
    with mock.patch.object(processes, "oom_kills", iter(range(9)).__next__):
        kind, reason = _killed()
    assert kind == "out_of_memory" and "most likely for memory" in reason


def _shared_by_three(folder: Path) -> None:
    held = bytearray(os.urandom(1)) * (300 << 20)
    os.setpgid(0, 0)
    for _ in range(2):
        if os.fork() == 0:
            break
    (folder / f"{os.getpid()}").write_text(str(held[0]))
    signal.pause()


def test_memory_that_processes_share_comes_back_once(tmp_path: Path) -> None:
    leader = os.fork()
    if leader == 0:
        _shared_by_three(tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3, within_s=30)
    receipt = processes.end_group(leader, grace_s=0)
    os.waitpid(leader, 0)
    assert len(receipt.pids) == 3
    assert 250 << 20 < receipt.memory_back_bytes < 750 << 20  # and something of what they were forked from
