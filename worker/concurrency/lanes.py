"""What is timed: a lane is one way of doing the work; all lanes of a part take turns, round after round.

    lane = Lane("concurrent", run=lambda: at_once(), timing="compute", of="concurrent", at={"devices": 2})
    record = race([lane, ...], "concurrency", plan)       # worker.measure.race
    lane.typical.spans                                     # the timeline of the run nearest the median

A run times itself, from the order to the moment at which the last device is done, and checks afterwards what it made.
A Lane answers what the race asks of a contestant, so rounds, looks, budget and statistics are those of `jit`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from worker.measure.roofline import Work
from worker.measure.stopwatch import FLAT, SETTLE_BELOW_S

_LONGEST_WARM_UP = 20


@dataclass(frozen=True)
class Piece:
    """A span of a run: seconds from its begin."""

    name: str
    start_s: float
    end_s: float
    at: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One run."""

    seconds: float
    pieces: list[Piece]


@dataclass
class Lane:
    """One way of doing the work, and what was measured of it."""

    name: str
    run: Callable[[], Sample]
    timing: str
    of: str
    at: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    work: Work | None = None
    """What a run takes; None where floating-point operations and bytes are not what it is about."""
    ranks: tuple[int, ...] = (0,)
    """The devices that do that work."""

    def ask(self, request: str, /, **arguments: Any) -> Any:
        """What the race asks: `first_call`, `warm_up`, `turn`."""
        if request == "first_call":
            return self.run().seconds
        if request == "warm_up":
            return self._warm_up(arguments["limit_s"])
        assert request == "turn", request
        if arguments["call_s"] < SETTLE_BELOW_S:
            self.run()
        sample = self.run()
        self.samples.append(sample)
        return [sample.seconds, sample.seconds]

    @property
    def typical(self) -> Sample:
        """The timed run nearest the median."""
        middle = statistics.median(sample.seconds for sample in self.samples)
        return min(self.samples, key=lambda sample: abs(sample.seconds - middle))

    def _warm_up(self, limit_s: float) -> dict[str, Any]:
        """Run until it no longer gets faster, while `limit_s` lasts, and once at least. A run is many operations that
        were warmed up before: where time is left for two only, the second must not be faster than the first."""
        seconds: list[float] = []
        flat = False
        while not flat and (not seconds or sum(seconds) < limit_s) and len(seconds) < _LONGEST_WARM_UP:
            seconds.append(self.run().seconds)
            flat = len(seconds) > 1 and seconds[-1] >= FLAT * min(seconds[:-1])
        # One run that alone fills the time tells nothing of flatness; what is in it is warm since `prepare`.
        return {"samples_s": seconds, "flat": flat or len(seconds) == 1, "call_s": statistics.median(seconds)}
