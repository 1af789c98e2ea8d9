"""Probe `process`: what it costs two processes to talk to each other on one host, and to start one.

Two processes, pinned to the first and the last of the job's cores, hand each other:

- a stream through shared memory (`shared_memory`) and through a pipe (`pipe`);
- the turn: `semaphore_handover` (its number lies in shared memory) and `pipe_handover` (its number is what is sent).

`lock_contended` is a lock of which both want to be the holder all the time, `lock_free` one that nobody else wants.
`thread_start`, `fork`, `exec`, `python_start` and `torch_start` are starts, each timed until its end was waited for.
Python drives all of it: a turn or a lock holds up to a microsecond of the interpreter's.
"""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import resource
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable

from worker.hardware.pair import Pair, ask_all, closing, span_s, time_runs
from worker.hardware.probe import ProbeBench, ProbeReport, Repeats
from worker.measure.contestant import Contestant
from worker.measure.statistics import FEWEST_ROUNDS

STREAM_BYTES = 32 << 20
_PARTS = 8
"""That share the time evenly; `torch_start` comes last and takes what it takes."""
_TORCH_START_S = 3.0
"""What a start with torch is expected to take; a probe with less than half of it in all skips it."""
_RUN_S = 20e-3
_NUMBER = struct.Struct("=Q")
_fork = multiprocessing.get_context("fork")
"""Its semaphores have no name: nothing is left of them, however this ends."""


class SharedMemory:
    """A ring of slots in memory that both processes map, with semaphores for what is filled and what is free."""

    chunk_bytes = 1 << 20
    slots = 4

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self.slots * self.chunk_bytes)
        self._ring = memoryview(self._memory)
        self._number = mmap.mmap(-1, mmap.PAGESIZE)
        self._free, self._filled = _fork.Semaphore(self.slots), _fork.Semaphore(0)
        self._turns = (_fork.Semaphore(0), _fork.Semaphore(0))
        self._at = 0

    def take_side(self, side: int) -> None:
        self._mine, self._theirs = self._turns[side], self._turns[1 - side]

    def put(self, piece: memoryview) -> None:
        self._free.acquire()
        self._ring[self._at : self._at + len(piece)] = piece
        self._filled.release()
        self._at = (self._at + self.chunk_bytes) % len(self._ring)

    def take(self, into: memoryview) -> None:
        self._filled.acquire()
        into[:] = self._ring[self._at : self._at + len(into)]
        self._free.release()
        self._at = (self._at + self.chunk_bytes) % len(self._ring)

    def give_turn(self, number: int, message: memoryview) -> None:
        _NUMBER.pack_into(self._number, 0, number)
        self._theirs.release()

    def await_turn(self, message: memoryview) -> int:
        self._mine.acquire()
        return int(_NUMBER.unpack_from(self._number)[0])

    def close(self) -> None:
        self._ring.release()
        self._memory.close()
        self._number.close()


class Pipes:
    """A pipe each way."""

    chunk_bytes = 1 << 16

    def __init__(self) -> None:
        self._ends = [os.pipe(), os.pipe()]
        self.capacity_bytes = fcntl.fcntl(self._ends[0][1], fcntl.F_GETPIPE_SZ)

    def take_side(self, side: int) -> None:
        self._out, self._in = self._ends[side][1], self._ends[1 - side][0]

    def put(self, piece: memoryview) -> None:
        while piece:
            piece = piece[os.write(self._out, piece) :]

    def take(self, into: memoryview) -> None:
        while into:
            got = os.readv(self._in, [into])
            if got == 0:
                raise EOFError("the other process closed the pipe")
            into = into[got:]

    def give_turn(self, number: int, message: memoryview) -> None:
        _NUMBER.pack_into(message, 0, number)
        self.put(message)

    def await_turn(self, message: memoryview) -> int:
        self.take(message)
        return int(_NUMBER.unpack_from(message)[0])

    def close(self) -> None:
        for end in (end for ends in self._ends for end in ends):
            os.close(end)


def run(bench: ProbeBench) -> ProbeReport:
    """Measure it."""
    report = ProbeReport("process")
    room_s = bench.budget_s - _TORCH_START_S
    part_s = (room_s if room_s > 1 else bench.budget_s) / _PARTS
    total_bytes = min(STREAM_BYTES, bench.memory_bytes // 16) // (1 << 20) * (1 << 20)
    memory = SharedMemory()
    with Pair.start("memory", bench.cores, memory) as pair:
        method = (
            f"memcpy into and out of a shared mapping, {memory.slots} slots of {memory.chunk_bytes} bytes, semaphores"
        )
        pair.stream(bench, report, "shared_memory", total_bytes=total_bytes, budget_s=part_s, method=method)
        method = "number in shared memory, POSIX semaphores (futex)"
        pair.handover(bench, report, "semaphore_handover", message_bytes=8, budget_s=part_s, method=method)
    pipes = Pipes()
    with Pair.start("pipe", bench.cores, pipes) as pair:
        method = f"os.pipe of {pipes.capacity_bytes} bytes, {pipes.chunk_bytes} bytes a write"
        pair.stream(bench, report, "pipe", total_bytes=total_bytes, budget_s=part_s, method=method)
        pair.handover(bench, report, "pipe_handover", message_bytes=8, budget_s=part_s, method="os.pipe each way")
    _measure_locks(bench, report, part_s)
    _measure_starts(bench, report, part_s / 2)
    if bench.budget_s >= _TORCH_START_S / 2:
        _measure_torch_start(bench, report)
    else:
        report.skip("torch_start", f"the probe's {bench.budget_s:.1f} s are not enough for it")
    return report


class Locker:
    """A process that takes a lock and lets go of it, again and again."""

    def __init__(self, lock: object, counter: mmap.mmap) -> None:
        self._lock, self._counter = lock, counter

    def count_up(self, count: int) -> dict[str, float]:
        """Add 1 to the shared counter under the lock, `count` times: when that began and ended."""
        lock, counter = self._lock, memoryview(self._counter).cast("Q")
        begun_s = time.perf_counter()
        for _ in range(count):
            with lock:  # type: ignore[attr-defined]
                counter[0] += 1
        ended_s = time.perf_counter()
        counter.release()
        return {"begun_s": begun_s, "ended_s": ended_s}


def _measure_locks(bench: ProbeBench, report: ProbeReport, budget_s: float) -> None:
    """One process alone, then two at once."""
    lock, counter = _fork.Lock(), mmap.mmap(-1, mmap.PAGESIZE)
    lockers = [
        Contestant.start(f"lock:{side}", lambda: Locker(lock, counter), (core,), 1)
        for side, core in enumerate((bench.cores[0], bench.cores[-1]))
    ]
    added = 0
    with closing(lockers):
        for name, crew, who in (
            ("lock_free", lockers[:1], "one process"),
            ("lock_contended", lockers, f"two processes on cores {bench.cores[0]} and {bench.cores[-1]}"),
        ):
            bench.progress(f"process: {name}")

            def run(count: int, crew: list[Contestant] = crew) -> float:
                nonlocal added
                added += count * len(crew)
                return span_s(ask_all([(one, ("count_up", {"count": count})) for one in crew]))

            count, took = time_runs(run, run_s=_RUN_S, budget_s=budget_s / 2)
            method = f"multiprocessing.Lock (a POSIX semaphore) around counter += 1, from Python; {who}"
            report.latency(name, took, count=count * len(crew), method=f"{method}; time over all additions")
    (found,) = _NUMBER.unpack_from(counter)
    counter.close()
    report.check("lock_excludes", found == added, "additions made", f"{found} of {added} additions under the lock")


class Starter:
    """A process that starts threads and processes, and waits for the end of each."""

    def __init__(self) -> None:
        self._true = shutil.which("true")

    def resident_bytes(self) -> int:
        """What a fork of this process has to map again."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def repeat(self, what: str, budget_s: float, at_least: int) -> list[float] | None:
        """Seconds of each start, the first one left out where there are more; None where the program is missing."""
        starts: dict[str, Callable[[], None]] = {
            "thread_start": self._thread,
            "fork": self._fork,
            "exec": self._exec,
            "python_start": self._python,
            "torch_start": self._torch,
        }
        start = starts[what]
        if what == "exec" and self._true is None:
            return None
        seconds = list[float]()
        end_s = time.perf_counter() + budget_s
        while len(seconds) < at_least or (time.perf_counter() < end_s and len(seconds) < 2000):
            begun_s = time.perf_counter()
            start()
            seconds.append(time.perf_counter() - begun_s)
        return seconds[1:] or seconds

    @staticmethod
    def _thread() -> None:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

    @staticmethod
    def _fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        _reap(pid)

    def _exec(self) -> None:
        assert self._true is not None
        _reap(os.posix_spawn(self._true, ["true"], {}))

    @staticmethod
    def _python() -> None:
        _reap(os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", "pass"], os.environ))

    @staticmethod
    def _torch() -> None:
        # It lives long enough to outlive a job that is killed: so it asks to be killed with its parent.
        program = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL); import torch"
        _reap(os.posix_spawn(sys.executable, [sys.executable, "-c", program], os.environ))


def _reap(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"a process that was started ended with {os.waitstatus_to_exitcode(status)}")


def _measure_starts(bench: ProbeBench, report: ProbeReport, budget_s: float) -> None:
    starter = Contestant.start("starter", Starter, bench.cores, 1)
    with closing([starter]):
        ((resident_bytes),) = ask_all([(starter, ("resident_bytes", {}))])
        size = f"{resident_bytes / 1e6:.0f} MB"
        for name, method in (
            ("thread_start", "threading.Thread, started and joined"),
            ("fork", f"os.fork of a process of {size} with torch imported, _exit, waitpid"),
            ("exec", "posix_spawn of `true`, waitpid"),
            ("python_start", "posix_spawn of `python -I -S -c pass`, waitpid"),
        ):
            bench.progress(f"process: {name}")
            asked = {"what": name, "budget_s": budget_s, "at_least": 1 + FEWEST_ROUNDS}
            (seconds,) = ask_all([(starter, ("repeat", asked))])
            if seconds is None:
                report.missing(name, "s", "there is no program `true` on PATH", method=method)
            else:
                report.latency(name, Repeats(tuple(seconds)), count=1, method=method)


def _measure_torch_start(bench: ProbeBench, report: ProbeReport) -> None:
    bench.progress("process: torch_start")
    starter = Contestant.start("starter", Starter, bench.cores, 1)
    with closing([starter]):
        (seconds,) = ask_all([(starter, ("repeat", {"what": "torch_start", "budget_s": 0.0, "at_least": 1}))])
    method = "posix_spawn of `python -c 'import torch'`, waitpid; its files were read before by this process"
    report.latency("torch_start", Repeats(tuple(seconds)), count=1, method=method)
