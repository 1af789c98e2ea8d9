"""Ties between a process and its children, so that none outlives what started it.

    subprocess.Popen(argv, start_new_session=True, preexec_fn=die_with_parent(os.getpid()))
    ...
    kill_group(process.pid)          # the child and everything that stayed in its session's group

On Linux the kernel does the two things that a program killed by SIGKILL cannot do itself. Elsewhere `die_with_parent`
and `adopt_orphans` do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> Callable[[], None] | None:
    """A `preexec_fn` after which the kernel kills the child when the *thread* that forked it ends; None off Linux."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # loaded before the fork: little may be done after it

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died before the line above
            os._exit(1)

    return tie


def adopt_orphans() -> None:
    """From now on, descendants whose parent died become children of this process, so that it can end them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process group that `pid` leads; a group that is gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def kill_orphans(spared: Collection[int]) -> None:
    """Kill every child of this process that is not among `spared`, with all its descendants, and reap them."""
    if sys.platform != "linux":
        return
    import psutil

    this = psutil.Process()
    while orphans := [child for child in this.children() if child.pid not in spared]:
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [*orphan.children(recursive=True), orphan]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan.pid, 0)


def reap_orphans(spared: Collection[int]) -> None:
    """Collect adopted children that have ended, leaving those in `spared` to whoever waits for them."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in spared:
                return
            os.waitpid(ended.si_pid, 0)
