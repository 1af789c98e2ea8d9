"""A contestant: one process that holds one way of doing the work, and answers one request at a time over a pipe.

    eager = Contestant.start("eager", lambda: Runner(...), cores=(0, 1), threads=2)
    eager.ask("warm_up", key="1", limit_s=0.1)        # runs Runner.warm_up(...) over there, waits for its answer
    eager.close()

Its process is forked, so it starts in milliseconds with torch already imported; therefore the process that calls
`start` must never run a tensor operation (after a multi-threaded one, the operations of a forked child hang).
It stays in the caller's process group, dies with the caller, and is pinned to `cores`. Requests and answers are JSON:
what a contestant runs may be a stranger's program, and JSON cannot carry code back.

A contestant that raises, crashes, is killed or stands still makes `ask` raise ContestantFailed with the reason; the
others go on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

import orjson

from torchstone.errors import DataMissing, InvalidModel, OutOfMemory
from worker import processes

FailureKind = Literal["error", "invalid_model", "out_of_memory", "unavailable", "data_missing", "died"]
_LOOK_MS = 1000
STILL_LOOKS = 20
"""So many looks in a row that find a contestant at rest, and it is given up: what it does takes processor time."""
_MEMORY_WORDS = ("can't allocate memory", "out of memory", "cannot allocate memory", "bad_alloc", "not enough memory")


class Unavailable(Exception):
    """Raised inside a contestant: this way cannot run here at all (a missing package, a missing device)."""


class ContestantFailed(Exception):
    """What became of a contestant that could not answer: a kind and a readable reason."""

    def __init__(self, name: str, kind: FailureKind, reason: str) -> None:
        super().__init__(name, kind, reason)
        self.name, self.kind, self.reason = name, kind, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass
class Contestant:
    """The caller's end of a contestant; see the module."""

    name: str
    pid: int
    pipe: Connection
    exit_status: int | None = None
    oom_kills: int | None = None
    """Of the machine when it started."""

    @classmethod
    def start(cls, name: str, make: Callable[[], object], cores: tuple[int, ...], threads: int) -> Contestant:
        """Fork a process that holds the object which `make` returns there."""
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # Else the first full collection in the child would copy every page that it shares with this process.
        gc.freeze()
        with warnings.catch_warnings():
            # Python 3.12+ warns of forking beside threads: the caller's only other thread waits for its parent's end.
            warnings.filterwarnings("ignore", ".*use of fork\\(\\) may lead to deadlocks", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            ours.close()
            _live(name, make, theirs, parent, cores, threads)
        theirs.close()
        return cls(name, pid, ours, oom_kills=processes.oom_kills())

    def ask(self, request: str, /, **arguments: Any) -> Any:
        """Run the method named `request` over there; its answer. Raises ContestantFailed."""
        self.send(request, **arguments)
        return self.answer()

    def send(self, request: str, /, **arguments: Any) -> None:
        """Begin what `ask` does; `answer` waits for it."""
        try:
            self.pipe.send_bytes(orjson.dumps([request, arguments]))
        except OSError:
            raise self._died() from None

    def answer(self) -> Any:
        """The answer to the last `send`. Raises ContestantFailed."""
        self._wait()
        try:
            status, value = orjson.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._died() from None
        if status == "ok":
            return value
        raise ContestantFailed(self.name, value["kind"], value["reason"])

    def _wait(self) -> None:
        ready = select.poll()  # Connection.poll makes a new selector each time, which takes longer than the waking
        ready.register(self.pipe.fileno(), select.POLLIN)
        still = processes.Stillness(self.pid)
        while not ready.poll(_LOOK_MS):
            self.give_up_if_still(still)

    def give_up_if_still(self, still: processes.Stillness) -> None:
        """Look once more; end a process that stands still for too long. Raises ContestantFailed then."""
        if still.look() < STILL_LOOKS:
            return
        self.end()
        why = ": it is stopped by a signal" if still.is_stopped else ", and waits for no disk"
        reason = f"its process {self.pid} took no processor time for {STILL_LOOKS} s{why}; it was ended"
        raise ContestantFailed(self.name, "died", reason)

    @property
    def has_answered(self) -> bool:
        """Whether `answer` would not have to wait."""
        return self.pipe.poll()

    def end(self, cores: Iterable[int] = ()) -> None:
        """Have the process ended; `close` waits for it.

        Taking down its memory takes some 20 ms of a core: of one of `cores`, where some are given, and not its own.
        """
        if self.exit_status is None:
            if cores:
                with contextlib.suppress(OSError):  # not allowed to: then where it was
                    os.sched_setaffinity(self.pid, cores)
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and reap it."""
        self.end()
        self.pipe.close()
        if self.exit_status is None:
            _, self.exit_status = os.waitpid(self.pid, 0)

    def _died(self) -> ContestantFailed:
        if self.exit_status is None:
            _, self.exit_status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(self.exit_status)
        if code == -signal.SIGKILL and (self.oom_kills is None or processes.oom_kills() != self.oom_kills):
            return ContestantFailed(
                self.name, "out_of_memory", "its process was killed (SIGKILL), most likely for memory"
            )
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ContestantFailed(self.name, "died", f"its process {how}")


def _live(
    name: str, make: Callable[[], object], pipe: Connection, parent: int, cores: tuple[int, ...], threads: int
) -> NoReturn:
    """The whole life of the forked process: never returns into the caller's code."""
    code = 1
    try:
        processes.die_with_parent()
        if os.getppid() != parent:  # it ended before the kernel was told
            os._exit(1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.sched_setaffinity(0, cores)
        Path("/proc/self/comm").write_text(f"ts {name}"[:15])
        # Imported before the fork; asked for here, so that the caller's side needs no torch.
        import torch

        torch.set_num_threads(threads)
        _serve(make, pipe)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(make: Callable[[], object], pipe: Connection) -> None:
    subject: object | None = None
    while True:
        try:
            request, arguments = orjson.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            subject = subject or make()
            answer = ["ok", getattr(subject, request)(**arguments)]
        except Exception as error:
            kind, reason = explain(error)
            if kind == "error":
                traceback.print_exc()
            answer = ["failed", {"kind": kind, "reason": reason}]
        pipe.send_bytes(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY))


def explain(error: BaseException) -> tuple[FailureKind, str]:
    """The kind of a failure and one readable sentence of it."""
    message = " ".join(str(error).split())
    if isinstance(error, (MemoryError, OutOfMemory)) or any(word in message.lower() for word in _MEMORY_WORDS):
        return "out_of_memory", message or "out of memory"
    if isinstance(error, Unavailable):
        return "unavailable", message
    if isinstance(error, DataMissing):
        return "data_missing", message
    if isinstance(error, InvalidModel):
        return "invalid_model", message
    return "error", f"{type(error).__name__}: {message}"[:2000]
