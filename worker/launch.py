"""Starts a job's own process, watches it, limits it, ends it, and gives back what it had to say.

    launcher = Launcher()                        # one a worker; starts the forkserver that has torch imported
    process = launcher.start(assignment)         # about 20 ms once that is warm
    outcome = process.watch(on_output=..., on_progress=..., deadline_s=..., ...)   # until nothing of it is left
    process.stop("canceled")                     # from any thread

Every way out of `watch` goes by the same end: the whole process group and all descendants are gone before it returns.
Nothing here imports torch: a crash costs one child process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import orjson
import structlog

from torchstone.errors import SetupError
from worker import processes
from worker.bench import Assignment
from worker.channel import Channel
from worker.servers import COMPILER, PLAIN, ForkServers

log = structlog.get_logger(__name__)

LOOK_S = 0.25
"""How often limits are checked while a job says nothing."""
START_WITHIN_S = 120.0
"""A forkserver that has not started a process by then, its import of torch included, hangs: it is ended."""
LEAVE_WITHIN_S = 10.0
"""A process that has sent its result and is still there then is ended; the result counts."""
_DRAIN_WITHIN_S = 5.0
_SERVER_DIED = 255  # what multiprocessing gives for the exit code that the forkserver can no longer tell
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """How a job's process ended: its message, if it sent one, or why there is none."""

    message: dict[str, Any] | None
    stopped: str | None
    """Why the worker ended it: canceled | timed_out | out_of_memory | fenced | draining | lingering (after its last
    message); None if it ended by itself."""
    exit_code: int | None
    oom_killed: bool
    receipt: processes.Receipt
    peak_bytes: int
    orphaned: bool = False
    """Whether it died with the forkserver, through no fault of its own."""

    def died_how(self) -> str:
        """The end of a process that left no message, in words."""
        if self.exit_code is not None and self.exit_code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"ended with exit code {self.exit_code} and no result"


class _Door:
    """One forkserver's lasting thread, which starts processes through it, and who leads the jobs that it started."""

    def __init__(self, preload: str) -> None:
        # The kernel ends the forkserver when the thread that started it ends: so this one starts everything. One for
        # each: a server that imports for long, or hangs, holds up nobody else's jobs.
        self.starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"starter-{preload}")
        self.leaders: set[int] = set()
        self.lock = threading.Lock()


class Launcher:
    """The forkservers with torch imported, and the threads that start processes through them."""

    def __init__(self, entry: str = "worker.child", start_within_s: float = START_WITHIN_S) -> None:
        """`entry`: the module whose `main(assignment, events, output)` a job's process runs."""
        self._entry = entry
        self.start_within_s = start_within_s
        self._servers = ForkServers()
        self._doors = {preload: _Door(preload) for preload in (PLAIN, COMPILER)}

    @property
    def server_pid(self) -> int | None:
        """The pid of the forkserver that most jobs start from; None before it was started."""
        return self._servers.pid()

    def warm_up(self) -> None:
        """Start the forkserver, without waiting until it has imported torch. Raises SetupError where it cannot."""
        try:
            self._doors[PLAIN].starter.submit(self._servers.ensure, PLAIN).result()
        except OSError as error:  # its socket lies there, and the kernel takes no path of more than 107 bytes
            where = tempfile.gettempdir()
            raise SetupError(
                f"no process can be started with the temporary folder {where} ({error}): set TMPDIR to a shorter path"
            ) from error

    def start(self, assignment: Assignment, is_wanted: Callable[[], bool] = lambda: True) -> JobProcess | None:
        """Start a process for `assignment` (which becomes `worker.child.main`'s).

        The first start waits until the forkserver has imported torch, which takes seconds. None when the process was
        no longer wanted before it had started: it is ended as soon as it is there. Raises OSError where a start takes
        longer than `start_within_s`: the forkserver is ended then, and the next start begins with a new one.
        """
        starting = self._doors[assignment.preload].starter.submit(self._start, assignment)
        within_s = self.start_within_s
        deadline_s = time.monotonic() + within_s
        while not futures_wait([starting], LOOK_S).done and is_wanted() and time.monotonic() < deadline_s:
            pass
        if starting.done():
            return starting.result()
        if not is_wanted():
            starting.add_done_callback(_end_unwanted)
            return None
        server = self._servers.pid(assignment.preload)
        log.error("the forkserver hangs and is ended", pid=server)
        if server is not None:
            processes.end_group(server, grace_s=0)
        with contextlib.suppress(EOFError, OSError):  # what it waited for has come to its end
            return starting.result(within_s)
        raise OSError(f"the forkserver did not start the job's process within {within_s:g} s")

    def _start(self, assignment: Assignment) -> JobProcess:
        events, child_events = Pipe()
        output, child_output = Pipe(duplex=False)
        arguments = (self._entry, assignment, child_events, child_output)
        door = self._doors[assignment.preload]
        with door.lock:  # `sweep` must not take a leader for a stray before it is known
            process = self._servers.start(assignment.preload, _enter, arguments, f"job-{assignment.job_id}")
            assert process.pid is not None
            door.leaders.add(process.pid)
        try:
            child_events.close()
            child_output.close()
            record_leader(Path(assignment.folder), process.pid)
            server = self._servers.pid(assignment.preload)
            return JobProcess(self, assignment, process, server, events, output)
        except BaseException:  # a full disk, no descriptors left: nobody would watch it
            processes.end_group(process.pid, grace_s=0)
            self.forget(assignment.preload, process.pid)
            raise

    def sweep(self, preload: str) -> list[int]:
        """End what dead jobs left behind: this forkserver's children that lead no living job. Their pids."""
        door, server = self._doors[preload], self._servers.pid(preload)
        with door.lock:
            strays = [pid for pid in (processes.children(server) if server else []) if pid not in door.leaders]
            strays = [pid for pid in strays if processes.is_alive(pid)]
            for pid in strays:
                log.warning("ending a process that a job left behind", pid=pid)
                processes.end_group(pid, grace_s=0)
            return strays

    def forget(self, preload: str, pid: int) -> None:
        """The job led by `pid` is over."""
        door = self._doors[preload]
        with door.lock:
            door.leaders.discard(pid)

    def close(self) -> None:
        """End the forkservers; jobs must be over."""
        for door in self._doors.values():
            door.starter.shutdown(wait=False, cancel_futures=True)  # else they would start a server anew
        for server in self._servers.pids:
            processes.end_group(server, grace_s=0)  # first: a start may still wait for it
        for door in self._doors.values():
            door.starter.shutdown()


class JobProcess:
    """One job's process, from its start until nothing of it is left."""

    def __init__(
        self,
        launcher: Launcher,
        assignment: Assignment,
        process: BaseProcess,
        server_pid: int | None,
        events: Connection,
        output: Connection,
    ) -> None:
        self._launcher = launcher
        self._preload = assignment.preload
        self._process = process
        self._server_pid = server_pid
        self._events = Channel(events)
        self._output = output
        self._memory_limit_bytes = assignment.memory_limit_bytes
        self._stopped: str | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._lock = threading.Lock()
        assert process.pid is not None
        self.pid: int = process.pid

    def stop(self, reason: str) -> None:
        """Have `watch` end the job; the first reason counts."""
        with self._lock:
            if self._stopped is None:
                self._stopped = reason
                with contextlib.suppress(OSError):
                    os.write(self._wake_write, b"!")

    def reply(self, message: dict[str, Any]) -> None:
        """Answer the job, from any thread; one that has ended needs no answer."""
        with contextlib.suppress(OSError):
            self._events.connection.send_bytes(orjson.dumps(message))

    def discard(self) -> None:
        """End it unwatched."""
        processes.end_group(self.pid, grace_s=0)
        self._process.join(timeout=10)
        self._close()

    def watch(
        self,
        *,
        on_output: Callable[[bytes], None],
        on_progress: Callable[[dict[str, Any]], None],
        on_checkpoint: Callable[[dict[str, Any]], None],
        on_look: Callable[[], None],
        deadline_s: float,
        grace_s: float,
    ) -> Outcome:
        """Pass on what the job says until it has ended, for whatever reason; see Outcome.

        `on_checkpoint` has what it is told answered with `reply`, soon, but not by keeping this waiting.
        `on_look` is called at least every LOOK_S. `deadline_s` is on the monotonic clock.
        """
        watched = _Watched(processes.oom_kills() or 0, on_progress, on_checkpoint)
        open_ends = [self._events.connection, self._output]
        try:
            while self._stopped is None and self._process.is_alive():
                for ready in wait([*open_ends, self._process.sentinel, self._wake_read], timeout=LOOK_S):
                    if ready is self._output and not self._pass_output(on_output):
                        open_ends.remove(self._output)
                    if ready is self._events.connection and not self._take_messages(watched):
                        open_ends.remove(self._events.connection)
                self._limit(watched, deadline_s)
                on_look()
            receipt = processes.end_group(
                self.pid, grace_s if self._stopped not in (None, "out_of_memory", "fenced") else 0, watched.tree
            )
            self._process.join(timeout=10)
            orphaned = self._process.exitcode == _SERVER_DIED and self._is_server_gone()
            self._launcher.forget(self._preload, self.pid)
            self._launcher.sweep(self._preload)
            self._drain(watched, on_output)
            return Outcome(
                message=watched.message,
                stopped=self._stopped,
                exit_code=self._process.exitcode,
                oom_killed=(processes.oom_kills() or 0) > watched.oom_kills,
                receipt=receipt,
                peak_bytes=watched.peak_bytes,
                orphaned=orphaned and watched.message is None and self._stopped is None,
            )
        finally:
            self._close()

    def _limit(self, watched: _Watched, deadline_s: float) -> None:
        now_s = time.monotonic()
        if watched.message is not None:
            if now_s > watched.answered_s + LEAVE_WITHIN_S:
                self.stop("lingering")
        elif now_s > deadline_s:
            self.stop("timed_out")
        if now_s - watched.looked_s >= LOOK_S:
            watched.looked_s = now_s
            watched.tree = processes.descendants(self.pid)
            held_bytes = processes.private_bytes([self.pid, *watched.tree])
            watched.peak_bytes = max(watched.peak_bytes, held_bytes)
            limit_bytes = self._memory_limit_bytes
            if held_bytes > limit_bytes and processes.proportional_bytes([self.pid, *watched.tree]) > limit_bytes:
                self.stop("out_of_memory")

    def _pass_output(self, on_output: Callable[[bytes], None]) -> bool:
        """One read of what was printed; False at its end."""
        data = os.read(self._output.fileno(), _READ_BYTES)
        if data:
            on_output(data)
        return bool(data)

    def _take_messages(self, watched: _Watched) -> bool:
        """What it has to say; False at the end of that."""
        for message in self._events.read():
            if message is None:
                return False
            if message.get("type") == "progress":
                watched.on_progress(message["progress"])
            elif message.get("type") == "checkpoint":
                watched.on_checkpoint(message)
            else:
                watched.message = message
                watched.answered_s = time.monotonic()
        return True

    def _is_server_gone(self) -> bool:
        """Whether the forkserver has ended: its pipes close a moment before it has."""
        deadline_s = time.monotonic() + 1
        while self._server_pid is not None and processes.is_alive(self._server_pid):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.01)
        return True

    def _drain(self, watched: _Watched, on_output: Callable[[bytes], None]) -> None:
        """What was still in the pipes. Nobody should be left to write; a survivor is not listened to for ever."""
        deadline_s = time.monotonic() + _DRAIN_WITHIN_S
        with contextlib.suppress(OSError):
            while wait([self._events.connection], timeout=0) and self._take_messages(watched):
                if time.monotonic() > deadline_s:
                    break
        with contextlib.suppress(OSError):
            while wait([self._output], timeout=0) and self._pass_output(on_output):
                if time.monotonic() > deadline_s:
                    break

    def _close(self) -> None:
        self._launcher.forget(self._preload, self.pid)
        self._events.close()
        self._output.close()
        with self._lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1
        self._launcher.sweep(self._preload)


@dataclass
class _Watched:
    """What `watch` has gathered so far."""

    oom_kills: int
    on_progress: Callable[[dict[str, Any]], None]
    on_checkpoint: Callable[[dict[str, Any]], None]
    message: dict[str, Any] | None = None
    answered_s: float = 0.0
    tree: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    looked_s: float = 0.0


def record_leader(folder: Path, pid: int) -> None:
    """Note who leads a job, so that a later worker can end it should this one be killed."""
    leader = {"pid": pid, "started": processes.start_time(pid)}
    (folder / "leader.json").write_bytes(orjson.dumps(leader))


def end_recorded(folder: Path) -> list[int]:
    """End the job that an earlier worker started in `folder`, if it still runs; the pids that it took."""
    try:
        leader = orjson.loads((folder / "leader.json").read_bytes())
        pid, started = leader["pid"], leader["started"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return []
    if started is None or processes.start_time(pid) != started:
        return []
    return processes.end_group(pid, grace_s=0).pids


def _end_unwanted(starting: Future[JobProcess]) -> None:
    """A process that came too late for its job."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().discard()


def _enter(entry: str, assignment: Assignment, events: Connection, output: Connection) -> None:
    """The first step of the job's process: only there is what lies below the wall imported."""
    importlib.import_module(entry).main(assignment, events, output)
