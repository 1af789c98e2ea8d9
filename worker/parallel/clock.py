"""Where the time of each step went: five readings a step of the one clock that all processes of a machine share.

    clock.begin(); ...; clock.mark(INPUT); ...; clock.mark(READY); ...; clock.mark(SYNCED); ...; clock.mark(END)
    split([marks_of_rank_0, marks_of_rank_1])["wait_s"]

A rank's own work is done at READY: from then on it waits for the slowest rank and for what communication could not be
hidden behind computing, until SYNCED. Since the clock is the same for all, the two can be told apart afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

BEGIN, INPUT, READY, SYNCED, END = range(5)
Marks = NDArray[np.float64]
"""(steps, 5) seconds."""


class Clock:
    """The readings of one device."""

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        """`settle` waits until the device has done what it was given (a GPU runs behind)."""
        self._settle = settle
        self._rows: list[list[float]] = []

    def begin(self) -> None:
        """A step begins."""
        self._rows.append([time.perf_counter()] * 5)

    def mark(self, mark: int) -> None:
        """This part of the step is over; those after it count as none until they are marked too."""
        if mark == END:
            self._settle()
        row, now_s = self._rows[-1], time.perf_counter()
        row[mark:] = [now_s] * (5 - mark)

    def take(self) -> list[list[float]]:
        """All readings since the last call."""
        rows, self._rows = self._rows, []
        return rows


def split(devices: list[Marks]) -> dict[str, Marks]:
    """Seconds of each step, per device (steps, devices): input, compute, wait (for the slowest), communicate."""
    marks = np.stack(devices, axis=1)  # (steps, devices, 5)
    slowest = marks[:, :, READY].max(axis=1, keepdims=True)
    synced = np.maximum(marks[:, :, SYNCED], slowest)
    parallel = len(devices) > 1
    return {
        "input_s": marks[:, :, INPUT] - marks[:, :, BEGIN],
        "compute_s": (marks[:, :, READY] - marks[:, :, INPUT])
        + (marks[:, :, END] - (synced if parallel else marks[:, :, SYNCED])),
        "wait_s": slowest - marks[:, :, READY],
        "communicate_s": synced - slowest,
    }
