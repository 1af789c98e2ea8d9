"""Processes and their descendants: kill them all, prove that they are gone, see what memory they hold.

    receipt = end_group(leader_pid, grace_s=3.0)     # TERM, grace, KILL; returns once none is left
    receipt.pids, receipt.took_ms, receipt.survivors

A job's process leads a session of its own and is a "subreaper": whatever its descendants do (fork twice, start their
own sessions), they stay below it, and when it dies they fall to the next subreaper up, the forkserver, where
`Launcher.sweep` finds them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Receipt:
    """What it took to end a job's processes."""

    pids: list[int] = field(default_factory=list)
    took_ms: float = 0.0
    killed: bool = False
    """Whether SIGTERM was not enough."""
    survivors: list[int] = field(default_factory=list)
    memory_back_bytes: int = 0
    """What they held of the machine's memory, a page that several share counted once, and hold no more."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it dies (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """Have orphaned descendants fall to this process instead of init (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def children(pid: int) -> list[int]:
    """The direct children of a process; empty when it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found.extend(map(int, (task / "children").read_text().split()))
    return found


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, without itself."""
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children(todo.pop())
        found.extend(below)
        todo.extend(below)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs: zombies, which only wait to be reaped, do not."""
    state = _stat(pid)
    return state is not None and state[0] not in ("Z", "X")


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot: with the pid it names one process for good."""
    state = _stat(pid)
    return None if state is None else state[19]


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on (the name before may hold anything)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


class Stillness:
    """Whether a process and all below it stand still: they take no processor time and wait for no disk.

    A look a second; one that was itself stopped meanwhile counts for no more than one.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.looks, self.is_stopped = pid, 0, False
        self._used: list[tuple[int, int]] | None = None

    def look(self) -> int:
        """How many times in a row, now included, nothing had moved."""
        states = {pid: _stat(pid) for pid in (self.pid, *descendants(self.pid))}
        told = {pid: state for pid, state in states.items() if state is not None}
        used = sorted((pid, sum(map(int, state[11:15]))) for pid, state in told.items())
        moves = used != self._used or any(state[0] in "RD" for state in told.values())
        self.looks = 0 if moves else self.looks + 1
        self.is_stopped = any(state[0] in "Tt" for state in told.values())
        self._used = used
        return self.looks


def oom_kills() -> int | None:
    """How many processes of this machine the kernel has killed for memory since it booted; None if it does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def proportional_bytes(pids: list[int]) -> int:
    """Memory of processes, files apart: each page by how many share it. Costs milliseconds a process.

    Where the kernel does not tell (before Linux 5.4, in some sandboxes), `private_bytes`.
    """
    total = 0
    for pid in pids:
        told: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "SwapPss:")):
                    told[line.partition(":")[0]] = 1024 * int(line.split()[1])
        total += sum(told.values()) if "Pss_Anon" in told else private_bytes([pid])
    return total


def private_bytes(pids: list[int]) -> int:
    """Resident memory of processes, files apart: quickly known, and never too little.

    What a process has had since it was forked, torch itself above all, counts for it and for its parent.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{pid}/statm").read_text().split()
            total += (int(words[1]) - int(words[2])) * _PAGE_BYTES
    return total


def end_group(leader: int, grace_s: float, also: list[int] | None = None) -> Receipt:
    """End `leader`, its process group and all its descendants: TERM, `grace_s` later KILL, until none is left.

    `also`: further processes known to belong to it. Gives up after 10 s of KILL (a process stuck in the kernel) and
    names the survivors.
    """
    begun = time.monotonic()
    receipt = Receipt()
    seen = {leader, *(also or [])}

    def living() -> list[int]:
        for pid in list(seen):
            seen.update(descendants(pid))
        return [pid for pid in seen if is_alive(pid)]

    receipt.pids = sorted(living())
    held_bytes = proportional_bytes(receipt.pids)
    if grace_s > 0 and receipt.pids:
        _signal(leader, receipt.pids, signal.SIGTERM)
        # A stopped process takes no TERM until it goes on.
        _signal(leader, receipt.pids, signal.SIGCONT)
        _wait_for(lambda: not living(), grace_s)
    for _ in range(100):
        left = living()
        receipt.pids = sorted({*receipt.pids, *left})
        if not left:
            break
        receipt.killed = True
        _signal(leader, left, signal.SIGKILL)
        _wait_for(lambda: not living(), 0.1)
    receipt.survivors = living()
    receipt.memory_back_bytes = max(0, held_bytes - proportional_bytes(receipt.survivors))
    receipt.took_ms = (time.monotonic() - begun) * 1e3
    return receipt


def _signal(leader: int, pids: list[int], number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(leader, number)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _wait_for(done: object, at_most_s: float) -> None:
    deadline = time.monotonic() + at_most_s
    pause_s = 0.001
    while not done() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)
