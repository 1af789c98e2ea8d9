"""The worker's sign of life for its jobs' processes: when it last renewed its leases, on the machine's own clock.

    alive = Alive(folder / "alive")
    alive.say(time.monotonic())                  # the worker, at each renewal
    is_silent(assignment)                        # the job's process, every few seconds

A worker that is stopped, or so starved that it does not get to anything, cannot end its jobs when their leases run
out; so the jobs look for themselves, and end before anybody else may start them.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

from worker.bench import Assignment

_STAMP = struct.Struct("d")
_ENDED_ITSELF = "ended-itself"


class Alive:
    """The file in which a worker says when it last renewed its leases."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def say(self, now_s: float) -> None:
        """Note `now_s` of the monotonic clock, which all processes of a machine share."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, _STAMP.pack(now_s), 0)
        finally:
            os.close(descriptor)


def look_every_s(silence_s: float) -> float | None:
    """How often to look so that silence is noticed well before a lease ends; None = never."""
    return silence_s / 8 if silence_s else None


def is_silent(assignment: Assignment) -> bool:
    """Whether the worker has not renewed its leases for longer than it may."""
    if not assignment.alive:
        return False
    try:
        (said_s,) = _STAMP.unpack(Path(assignment.alive).read_bytes())
    except (OSError, struct.error):  # somebody cleared the folder away; the worker's own end is still watched
        return False
    return bool(time.monotonic() - said_s > assignment.silence_s)


def end_itself(folder: Path) -> None:
    """Note in the job's folder that it is this that ends it."""
    (folder / _ENDED_ITSELF).touch()


def ended_itself(folder: Path) -> bool:
    """Whether the job ended because of its worker's silence."""
    return (folder / _ENDED_ITSELF).exists()
