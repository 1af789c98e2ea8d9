"""Where the time of each step went: readings of the one clock that all processes of a machine share.

    clock = clock_of(device)
    clock.begin(); ...; clock.mark(INPUT); ...; clock.mark(READY); ...; clock.mark(SYNCED); ...; clock.mark(END)
    split([clock_of_rank_0.take(), clock_of_rank_1.take()])["wait_s"]

Strategies that talk to other ranks in the middle of their work note there how long that took (`talking`).

A rank's own work is done at READY: from then on it waits for the slowest rank and for what communication could not be
hidden behind computing, until SYNCED. Since the clock is the same for all, the two can be told apart afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

BEGIN, INPUT, READY, SYNCED, END, TALK = range(6)
Marks = NDArray[np.float64]
"""(steps, 6): five readings in seconds, and the seconds that went by talking before READY."""

_SET_AFTER_STEPS = 25
"""How often the clock of a device that runs behind is set by the host's: theirs drift apart by some 10 us a second."""
_AHEAD_STEPS = 2
"""How far the host may be ahead: enough to keep the device at work, and what it tells of its progress is true."""
_TRIES = 5


class Clock:
    """The readings of one device that is done with an operation when it returns."""

    def __init__(self) -> None:
        self._rows: list[list[float]] = []

    def catch_up(self) -> None:
        """What takes time between steps: where one process has several clocks, done for all before one begins."""

    def begin(self) -> None:
        """A step begins."""
        self._rows.append([time.perf_counter()] * 5 + [0.0])

    def mark(self, mark: int) -> None:
        """This part of the step is over; those after it count as none until they are marked too."""
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


class StreamClock(Clock):
    """The same of a device that runs behind (a GPU): when its current stream came to each mark, not when the host did.

    The host need not wait for the device at every step: an event stands for a reading until the device has passed it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._steps: list[list[Any]] = []
        """As rows; instead of a reading its event, instead of the seconds of talking a begin and an end for each."""
        self._is_set = False

    def catch_up(self) -> None:
        if len(self._steps) >= _AHEAD_STEPS:
            self._steps[-_AHEAD_STEPS][END].synchronize()
        if len(self._steps) == _SET_AFTER_STEPS:
            self._read()
        if not self._is_set:
            self._set()

    def begin(self) -> None:
        self.catch_up()
        self._steps.append([self._event()] * 5 + [[]])

    def mark(self, mark: int) -> None:
        self._steps[-1][mark:TALK] = [self._event()] * (TALK - mark)

    @contextmanager
    def talking(self) -> Iterator[None]:
        begun = self._event()
        yield
        if self._steps:
            self._steps[-1][TALK].append((begun, self._event()))

    def take(self) -> list[list[float]]:
        self._read()
        return super().take()

    def _event(self) -> torch.Event:
        made = torch.Event(self._device, enable_timing=True)
        made.record(torch.accelerator.current_stream(self._device))
        return made

    def _set(self) -> None:
        """What the host's clock shows at an event that the idle device passes: between two readings, the closest pair.

        A host that is interrupted between the two is wrong by as much as they are apart.
        """
        closest_s = math.inf
        for _ in range(_TRIES):
            torch.accelerator.synchronize(self._device)
            before_s, event = time.perf_counter(), self._event()
            event.synchronize()
            after_s = time.perf_counter()
            if after_s - before_s < closest_s:
                closest_s = after_s - before_s
                self._set_at, self._set_s = event, (before_s + after_s) / 2
        self._is_set = True

    def _read(self) -> None:
        """Have a number for every event: the device has passed them all."""
        torch.accelerator.synchronize(self._device)
        for *marks, talks in self._steps:
            readings = [self._set_s + self._set_at.elapsed_time(event) / 1000 for event in marks]
            self._rows.append([*readings, sum(begun.elapsed_time(ended) for begun, ended in talks) / 1000])
        self._steps, self._is_set = [], False


def clock_of(device: torch.device) -> Clock:
    """The clock for what this device does."""
    return Clock() if device.type == "cpu" else StreamClock(device)


def split(devices: list[Marks]) -> dict[str, Marks]:
    """Seconds of each step, per device (steps, devices): input, compute, wait (for the slowest), communicate.

    A rank that does not meet the others after its own work (its SYNCED is its READY) waits for nobody then.
    """
    marks = np.stack(devices, axis=1)  # (steps, devices, 6)
    ready, synced, talked = marks[:, :, READY], marks[:, :, SYNCED], marks[:, :, TALK]
    if len(devices) == 1:  # nobody to meet
        synced = ready
    slowest = np.minimum(ready.max(axis=1, keepdims=True), synced)
    return {
        "input_s": marks[:, :, INPUT] - marks[:, :, BEGIN],
        "compute_s": (ready - marks[:, :, INPUT] - talked) + (marks[:, :, END] - synced),
        "wait_s": slowest - ready,
        "communicate_s": synced - slowest + talked,
    }
