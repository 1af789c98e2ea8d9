"""Ranks: the processes that train, one per device: started, pinned, asked all at once, watched, and blamed by name.

    with Gang.start("ddp", devices, threads, make=lambda rank, life: Trainer(...)) as gang:
        answers = gang.ask("train_epoch", {"epoch": 1})       # Trainer.train_epoch(epoch=1) on each; by rank

A rank that exits, is killed, is stopped or hangs makes `ask` raise RankLost with its number and the cause. One that
raises makes it raise GangFailed: that ends the strategy, not the job. A rank is taken for stuck when it has sent no
sign of life and used no CPU time for `silence_s`: one that compiles is busy. Of several silent ranks the one to blame
is the one that the others wait for: it is stopped, or its thread of life is still, or it is the furthest behind.

The process that starts a gang must never run a tensor operation (see `worker.measure.contestant`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from torchstone.errors import DataMissing, InvalidModel, JobError, OutOfMemory, RankLost, WorkloadError
from worker import processes
from worker.bench import LeasedDevice
from worker.measure.contestant import Contestant, FailureKind

LOOK_S = 0.5
"""How often silent ranks are looked at."""
BEAT_S = 0.25
_GRACE_S = 2.0
"""How long after a first failure the others may still say what they know: the first to fail is often innocent."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY_SHARE = 0.05
"""Of a core: the thread of life takes far less, anything that computes far more."""
_BUSY_WINDOW_S = 1.0
"""The kernel counts CPU time in ticks of 10 ms: over less, one tick would look like work."""
_LOST_CONTACT = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "timed out waiting",
    "broken pipe",
    "remote process exited",
    "recvvalue failed",
)
"""What gloo and NCCL say when another rank is gone."""


class GangFailed(Exception):
    """A strategy could not go on: a rank raised. `kind` and `reason` are as for a contestant."""

    def __init__(self, strategy: str, rank: int, kind: FailureKind, reason: str) -> None:
        super().__init__(f"{strategy}, rank {rank}: {reason}")
        self.strategy, self.rank, self.kind, self.reason = strategy, rank, kind, reason


class Life:
    """A rank's signs of life: how many steps it has taken, sent by a thread of its own while it is at work."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.steps = 0
        self.loss: float | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Signs are sent until this ends."""
        over = threading.Event()

        def beat() -> None:
            while not over.is_set():
                self._pipe.send_bytes(orjson.dumps({"steps": self.steps, "loss": self.loss}))
                over.wait(BEAT_S)

        thread = threading.Thread(target=beat, name="life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@dataclass
class Member:
    """A rank as its starter sees it."""

    rank: int
    contestant: Contestant
    life: Connection
    device: str
    steps: int = 0
    beat_s: float = 0.0
    """When its thread of life was last heard."""
    alive_s: float = 0.0
    """When it last took a step, or was last seen to use its CPU."""
    cpu_s: float = 0.0
    looked_s: float = 0.0
    failure: tuple[FailureKind, str] | None = None

    def begin(self, now_s: float) -> None:
        """It is asked something now."""
        self.beat_s = self.alive_s = self.looked_s = now_s
        self.cpu_s = cpu_time_s(self.contestant.pid)
        self.failure = None

    def hear(self, now_s: float) -> dict[str, Any] | None:
        """Take in one sign of life; None at the end of them."""
        try:
            sign: dict[str, Any] = orjson.loads(self.life.recv_bytes())
        except (EOFError, OSError):
            return None
        self.beat_s = now_s
        if sign["steps"] != self.steps:
            self.steps, self.alive_s = sign["steps"], now_s
        return sign

    def look(self, now_s: float) -> None:
        """See whether it used its CPU."""
        if now_s - self.looked_s < _BUSY_WINDOW_S:
            return
        cpu_s = cpu_time_s(self.contestant.pid)
        if cpu_s - self.cpu_s > _BUSY_SHARE * (now_s - self.looked_s):
            self.alive_s = now_s
        self.cpu_s, self.looked_s = cpu_s, now_s


@dataclass
class Gang:
    """All ranks of one strategy."""

    strategy: str
    members: list[Member]
    silence_s: float
    on_sign: Callable[[int, float | None], None] = lambda steps, loss: None
    """Told the steps and the loss of rank 0 whenever it gives a sign of life."""
    others: Callable[[], Sequence[Gang]] = tuple
    """The other gangs of the job, which wait for their turn: a rank that dies there is noticed too."""
    _closed: bool = field(default=False, repr=False)

    @classmethod
    def start(
        cls,
        strategy: str,
        devices: Sequence[LeasedDevice],
        threads: int | None,
        make: Callable[[int, Life], object],
        silence_s: float,
    ) -> Self:
        """Fork a process per device, pinned to it, that holds what `make(rank, life)` returns there."""
        members = []
        for rank, device in enumerate(devices):
            ours, theirs = Pipe(duplex=False)
            life = Life(theirs)
            contestant = Contestant.start(
                f"{strategy}:{rank}",
                lambda rank=rank, life=life: make(rank, life),  # type: ignore[misc]
                device.cores,
                threads or len(device.cores),
            )
            theirs.close()
            members.append(Member(rank, contestant, ours, device.name))
        return cls(strategy, members, silence_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' processes."""
        return tuple(member.contestant.pid for member in self.members)

    def close(self) -> None:
        """End every rank."""
        if not self._closed:
            self._closed = True
            for member in self.members:
                member.contestant.end()
            for member in self.members:
                member.contestant.close()
                member.life.close()

    def ask(self, request: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        """Run the method `request` on every rank; their answers, by rank. Raises RankLost, GangFailed."""
        begun_s = time.monotonic()
        message = orjson.dumps([request, arguments or {}])
        for member in self.members:
            member.begin(begun_s)
            try:
                member.contestant.pipe.send_bytes(message)
            except OSError:
                raise self._lost(member) from None
        return self._gather()

    def _gather(self) -> list[Any]:
        answers: list[Any] = [None] * len(self.members)
        pending = {member.contestant.pipe: member for member in self.members}
        lives = {member.life: member for member in self.members}
        blame_at_s: float | None = None
        while pending:
            idle = {m.contestant.pipe: (gang, m) for gang in self.others() if gang is not self for m in gang.members}
            ready = wait([*pending, *lives, *idle], timeout=LOOK_S)
            now_s = time.monotonic()
            for end in ready:
                if end in idle:
                    gang, member = idle[end]
                    raise gang._lost(member)
                if end in pending:
                    member = pending[end]
                    try:
                        status, value = orjson.loads(member.contestant.pipe.recv_bytes())
                    except (EOFError, OSError):
                        raise self._lost(member) from None
                    del pending[member.contestant.pipe]
                    if status == "ok":
                        answers[member.rank] = value
                    else:
                        member.failure = (value["kind"], value["reason"])
                        blame_at_s = blame_at_s or now_s + _GRACE_S
                elif end in lives:
                    member = lives[end]
                    sign = member.hear(now_s)
                    if sign is None:
                        del lives[member.life]
                    elif member.rank == 0:
                        self.on_sign(sign["steps"], sign["loss"])
            if blame_at_s is not None and (now_s >= blame_at_s or not pending):
                raise self._blame(list(pending.values()), now_s)
            self._look_for_stuck(list(pending.values()), now_s)
        return answers

    def _look_for_stuck(self, pending: list[Member], now_s: float) -> None:
        for member in pending:
            member.look(now_s)
        silent = [member for member in pending if now_s - max(member.alive_s, 0) > self.silence_s]
        if not silent or any(now_s - member.alive_s <= self.silence_s for member in pending):
            # While one rank computes the others may rightly wait for it; but not for one that is stopped.
            silent = [member for member in silent if now_s - member.beat_s > self.silence_s]
        if silent:
            raise self._stuck(silent, now_s)

    def _stuck(self, silent: list[Member], now_s: float) -> RankLost:
        def guilt(member: Member) -> tuple[bool, bool, int, int]:
            still = now_s - member.beat_s > self.silence_s / 2
            return (is_stopped(member.contestant.pid), still, -member.steps, -member.rank)

        member = max(silent, key=guilt)
        how = "it is stopped" if is_stopped(member.contestant.pid) else "it is stuck"
        return RankLost(
            f"rank {member.rank} of {self.strategy} ({member.device}) gave no sign of life and used no CPU time "
            f"for {now_s - member.alive_s:.0f} s: {how} after step {member.steps}",
            rank=member.rank,
        )

    def _blame(self, pending: list[Member], now_s: float) -> Exception:
        """What became of the gang, once some ranks have failed and the others had time to speak."""
        failed = [(member, *member.failure) for member in self.members if member.failure is not None]
        for member, kind, reason in failed:
            if kind != "error" or not any(word in reason.lower() for word in _LOST_CONTACT):
                return GangFailed(self.strategy, member.rank, kind, reason)
        silent = [member for member in pending if now_s - member.alive_s > _GRACE_S]
        if silent:
            return self._stuck(silent, now_s)
        member, _, reason = failed[0]
        return RankLost(f"rank {member.rank} of {self.strategy} lost the others: {reason}", rank=member.rank)

    def _lost(self, member: Member) -> RankLost:
        """The process of this rank is gone."""
        contestant = member.contestant
        if contestant.exit_status is None:
            _, contestant.exit_status = os.waitpid(contestant.pid, 0)
        code = os.waitstatus_to_exitcode(contestant.exit_status)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        where = f"rank {member.rank} of {self.strategy} ({member.device})"
        return RankLost(f"{where} {how} after step {member.steps}", rank=member.rank)


def cpu_time_s(pid: int) -> float:
    """CPU seconds of a process, of the children that it has waited for, and of those that still run."""
    total = 0
    for each in (pid, *processes.descendants(pid)):
        try:
            words = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(word) for word in words[11:15])
    return total / _TICKS_PER_S


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def job_error(failure: GangFailed) -> JobError:
    """The error that ends the job because of `failure`."""
    kinds: dict[str, type[JobError]] = {
        "data_missing": DataMissing,
        "invalid_model": InvalidModel,
        "out_of_memory": OutOfMemory,
    }
    return kinds[failure.kind](failure.reason) if failure.kind in kinds else WorkloadError(str(failure))
