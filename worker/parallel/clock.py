"""Where the time of each step went: readings of the one clock that all processes of a machine share.

    clock.begin(); ...; clock.mark(INPUT); ...; clock.mark(READY); ...; clock.mark(SYNCED); ...; clock.mark(END)
    split([marks_of_rank_0, marks_of_rank_1])["wait_s"]

Strategies that talk to other ranks in the middle of their work note there how long that took (`talking`).

A rank's own work is done at READY: from then on it waits for the slowest rank and for what communication could not be
hidden behind computing, until SYNCED. Since the clock is the same for all, the two can be told apart afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

BEGIN, INPUT, READY, SYNCED, END, TALK = range(6)
Marks = NDArray[np.float64]
"""(steps, 6): five readings in seconds, and the seconds that went by talking before READY."""


class Clock:
    """The readings of one device."""

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        """`settle` waits until the device has done what it was given (a GPU runs behind)."""
        self._settle = settle
        self._rows: list[list[float]] = []

    def begin(self) -> None:
        """A step begins."""
        self._rows.append([time.perf_counter()] * 5 + [0.0])

    def mark(self, mark: int) -> None:
        """This part of the step is over; those after it count as none until they are marked too."""
        if mark == END:
            self._settle()
        row, now_s = self._rows[-1], time.perf_counter()
        row[mark:TALK] = [now_s] * (TALK - mark)

    @contextmanager
    def talking(self) -> Iterator[None]:
        """What is inside waits for other ranks."""
        begun_s = time.perf_counter()
        yield
        if self._rows:
            self._rows[-1][TALK] += time.perf_counter() - begun_s

    def take(self) -> list[list[float]]:
        """All readings since the last call."""
        rows, self._rows = self._rows, []
        return rows


def split(devices: list[Marks]) -> dict[str, Marks]:
    """Seconds of each step, per device (steps, devices): input, compute, wait (for the slowest), communicate."""
    marks = np.stack(devices, axis=1)  # (steps, devices, 6)
    slowest = marks[:, :, READY].max(axis=1, keepdims=True)
    synced = np.maximum(marks[:, :, SYNCED], slowest)
    parallel = len(devices) > 1
    return {
        "input_s": marks[:, :, INPUT] - marks[:, :, BEGIN],
        "compute_s": (marks[:, :, READY] - marks[:, :, INPUT] - marks[:, :, TALK])
        + (marks[:, :, END] - (synced if parallel else marks[:, :, SYNCED])),
        "wait_s": slowest - marks[:, :, READY],
        "communicate_s": synced - slowest + marks[:, :, TALK],
    }
