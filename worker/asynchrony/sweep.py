"""Rounds over many sizes: every contestant at every size once a round, in random order.

    sweep = Sweep(contest, "dispatch", sizes)
    sweep.run()
    sweep.column("cpu:0", 256, 0)          # seconds per operation until done, a sample a round

A race (`worker.measure.race`) compares contestants at one point; here a curve is wanted, so the points take turns too.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchstone.results import Code
from worker.asynchrony.contest import Contest, within
from worker.measure import statistics
from worker.measure.environment import Load, frequency_mhz
from worker.measure.quality import load_codes
from worker.measure.statistics import FEWEST_ROUNDS, FIRST_LOOK

COLUMNS = ("completion", "dispatch", "device")
"""What a turn tells: seconds until all was done, until the last call returned, and by the device's own clock."""
_BLOCK_S = 2e-3
_MOST_IN_BLOCK = 256
"""Fewer than any device queues: a block that filled the queue would time how fast it empties."""
_MOST_ROUNDS = 240


@dataclass
class Sweep:
    """Rounds over all contestants and sizes in random order: what disturbs the machine disturbs all sizes alike."""

    contest: Contest
    sizes: list[int]
    samples: dict[tuple[str, str], list[list[float]]] = field(default_factory=dict)
    """Per contestant and size, per round: [done, returned, by the device's clock], seconds per operation."""
    first_call_s: dict[tuple[str, str], float] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    rounds: int = 0

    def run(self) -> None:
        """Warm up, then rounds until every completion is known as precisely as asked, or the budget is spent."""
        contest, stage, part = self.contest, self.contest.stage, self.contest.part
        stage.say(f"{part}: streams of products at {len(self.sizes)} sizes for at most {contest.budget_s:.1f} s")
        start_s = time.perf_counter()
        call_s = self._warm_up(0.15 * contest.budget_s)
        draw, before = random.Random(stage.spec.seed), Load.now(contest.cores, contest.pids)
        frequency_before_mhz = frequency_mhz(contest.cores[0])
        tell, longest_s = stage.progress_of(part), 0.0
        while not self._is_enough():
            round_start_s = time.perf_counter()
            if self.rounds and round_start_s + longest_s - start_s > contest.budget_s:
                break
            for lane, key in self._order(draw, list(call_s)):
                if key is None:
                    contest.attempt(lane, "rest")
                    continue
                calls = self.calls[lane, key]
                settle_s = min(0.5e-3, calls * call_s[lane, key])
                took = contest.attempt(lane, "turn", key=key, calls=calls, settle_s=settle_s, call_s=call_s[lane, key])
                if took is not None:
                    self.samples.setdefault((lane, key), []).append([seconds / calls for seconds in took])
            self.rounds += 1
            longest_s = max(0.9 * longest_s, time.perf_counter() - round_start_s)
            tell(self.rounds, None, max(0.0, contest.budget_s - (time.perf_counter() - start_s)))
        during = Load.now(contest.cores, contest.pids).since(before)
        stage.host["during"][part] = during
        codes = load_codes(during, (frequency_before_mhz, frequency_mhz(contest.cores[0])))
        stage.codes += [within(part, code) for code in [*codes, *self._codes()]]
        for (lane, key), rows in self.samples.items():
            for index, what in enumerate(COLUMNS[: len(rows[0])]):
                stage.arrays[f"{lane}/{part}/{key}/{what}"] = np.array([row[index] for row in rows])
        print(f"  {self.rounds} rounds in {time.perf_counter() - start_s:.2f} s", flush=True)

    def _order(self, draw: random.Random, places: list[tuple[str, str]]) -> Iterator[tuple[str, str | None]]:
        """One contestant after another, each at all sizes and then (None) at rest; both in random order."""
        names = self.contest.names
        for lane in draw.sample(names, len(names)):
            ours = [place for place in places if place[0] == lane and self._takes_part(place)]
            yield from draw.sample(ours, len(ours))
            yield lane, None

    def column(self, lane: str, size: int, index: int) -> statistics.Samples:
        """One column of a contestant's samples at a size; empty where it has none."""
        rows = self.samples.get((lane, str(size)), [])
        return np.array([row[index] for row in rows if len(row) > index])

    def medians(self, lane: str, index: int) -> list[float | None]:
        """By size."""
        columns = [self.column(lane, size, index) for size in self.sizes]
        return [float(np.median(column)) if len(column) else None for column in columns]

    def _warm_up(self, limit_s: float) -> dict[tuple[str, str], float]:
        contest = self.contest
        call_s = {}
        places = [(lane, str(size)) for lane in contest.names for size in self.sizes]
        for lane, key in places:
            first = contest.attempt(lane, "first_call", key=key)
            told = contest.attempt(lane, "warm_up", key=key, limit_s=limit_s / len(places))
            if told is not None:
                self.first_call_s[lane, key] = first
                call_s[lane, key] = max(told["call_s"], 1e-9)
                self.calls[lane, key] = min(_MOST_IN_BLOCK, max(1, round(_BLOCK_S / call_s[lane, key])))
        return call_s

    def _takes_part(self, place: tuple[str, str]) -> bool:
        wanted = self.contest.stage.spec.calls
        return wanted is None or len(self.samples.get(place, [])) * self.calls[place] < wanted

    def _is_enough(self) -> bool:
        spec = self.contest.stage.spec
        if not self.contest.names:
            return True
        if spec.calls is not None:
            return not any(self._takes_part(place) for place in self.calls if place[0] in self.contest.names)
        if self.rounds < FIRST_LOOK or self.rounds % FIRST_LOOK:
            return self.rounds >= _MOST_ROUNDS
        widths = []
        for (lane, _), rows in self.samples.items():
            if lane in self.contest.names:
                done = np.array([row[0] for row in rows])
                low, high = statistics.median_interval(done) or (0.0, math.inf)
                widths.append((high - low) / 2 / float(np.median(done)))
        return max(widths, default=0.0) <= spec.ci_half_width or self.rounds >= _MOST_ROUNDS

    def _codes(self) -> list[Code]:
        if self.rounds >= FIRST_LOOK or self.contest.stage.spec.calls is not None:
            return []
        evidence = {"rounds": self.rounds, "wanted": FIRST_LOOK}
        severity: Any = "warning" if self.rounds >= FEWEST_ROUNDS else "error"
        return [Code(code="too_few_rounds", severity=severity, evidence=evidence)]
