"""The clock inside a contestant's process: first calls, warm-up until flat, and blocks of timed calls.

    watch = Stopwatch()
    watch.calls["1"] = partial(model, x)          # zero arguments, so that the loop adds nothing
    watch.first_call("1")                         # seconds: lazy initialisation, compilation, tuning
    watch.warm_up("1", limit_s=0.2)               # kept apart from the steady samples
    watch.turn("1", calls=30, settle_s=5e-4)      # seconds of the block, synchronised at both ends

Garbage collection is off while the clock runs. A turn begins with calls that are not timed: another process has just
used the same cores, and its cache lines and still spinning threads must not be charged to this one.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

SHORTEST_SAMPLE_S = 200e-6
WINDOW = 5
FLAT = 0.98
"""Warm-up ends when the median of a window is no longer below this share of the window before it."""
SETTLE_BELOW_S = 50e-3

Call = Callable[[], object]


def nothing_to_wait_for() -> None:
    """The synchronisation of a CPU: calls are complete when they return."""


@dataclass
class Stopwatch:
    """Times the calls that it is given, by key (a key is a measuring point, such as a batch size).

    `mode` is the context that calls run in (inference mode, say): entered once a request, outside the clock.
    """

    synchronize: Callable[[], None] = nothing_to_wait_for
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    calls: dict[str, Call] = field(default_factory=dict)
    first_call_s: dict[str, float] = field(default_factory=dict)
    between: dict[str, Call] = field(default_factory=dict)
    """What is done before each call of a key, outside the clock (emptying caches, say): such calls are timed singly."""

    def first_call(self, key: str) -> float:
        """Seconds that the very first call took, synchronised at both ends; it is made now unless it was before."""
        if key not in self.first_call_s:
            with self.mode():
                self.first_call_s[key] = self._block(self.calls[key], 1)[0]
        return self.first_call_s[key]

    def warm_up(self, key: str, limit_s: float) -> dict[str, object]:
        """Call until the time per call no longer falls, for at most `limit_s` (one window at least where that fits).

        Returns `samples_s` (seconds per call), `flat`, and `call_s`, the median of the last window.
        """
        samples, medians = list[float](), list[float]()
        end_s = time.perf_counter() + limit_s
        block, flat = 1, False
        with self.mode():
            while not flat and (not samples or time.perf_counter() < end_s):
                for _ in range(WINDOW):
                    samples.append(self._timed(key, block)[0] / block)
                    if time.perf_counter() >= end_s:
                        break
                medians.append(statistics.median(samples[-WINDOW:]))
                flat = len(medians) >= 3 and medians[-1] >= FLAT * min(medians[-3:-1])
                block = 1 if key in self.between else max(1, round(SHORTEST_SAMPLE_S / medians[-1]))
        return {"samples_s": samples, "flat": flat, "call_s": statistics.median(samples[-WINDOW:])}

    def turn(self, key: str, calls: int, settle_s: float, call_s: float) -> list[float]:
        """One timed block of `calls` calls: [seconds until done, seconds until the last call returned].

        Before it, untimed calls for about `settle_s`, at least one, none where a call takes over 50 ms.
        """
        call = self.calls[key]
        untimed = max(1, round(settle_s / call_s)) if call_s < SETTLE_BELOW_S else 0
        with self.mode():
            for _ in itertools.repeat(None, untimed):
                call()
            return list(self._timed(key, calls))

    def _timed(self, key: str, calls: int) -> tuple[float, float]:
        before = self.between.get(key)
        if before is None:
            return self._block(self.calls[key], calls)
        seconds = returned = 0.0
        for _ in range(calls):
            before()
            took = self._block(self.calls[key], 1)
            seconds, returned = seconds + took[0], returned + took[1]
        return seconds, returned

    def _block(self, call: Call, calls: int) -> tuple[float, float]:
        clock, collecting = time.perf_counter, gc.isenabled()
        gc.disable()
        try:
            self.synchronize()
            start_s = clock()
            for _ in itertools.repeat(None, calls):
                call()
            returned_s = clock()
            self.synchronize()
            return clock() - start_s, returned_s - start_s
        finally:
            if collecting:
                gc.enable()
