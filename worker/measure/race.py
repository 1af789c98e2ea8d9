"""The race: contestants warm up, then take turns in random order, round after round, until the answer is sharp.

    plan = Plan(baseline="eager", twin="eager_again", half_width=0.01, budget_s=20)
    record = race(contestants, "1", plan, on_round)
    record.seconds["script"]          # seconds per call, one sample a round; row k of all was taken in round k

Every contestant has one turn in every round, so that heat, neighbours and frequency hit all alike. At 30, 60, 120 ...
rounds the ratio of medians against the baseline is looked at; when every interval is narrow enough the race ends
("precision"), else with the budget ("budget") or after the fixed number of calls ("calls").

The budget covers warm-up and rounds. Every contestant has one turn whatever the budget says, and one call to warm up
where any of it is left: where these take longer, the budget is overrun, and a code tells so.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from worker.measure import statistics
from worker.measure.contestant import ContestantFailed
from worker.measure.statistics import ALPHA, FIRST_LOOK, Samples

BLOCK_S = 2e-3
SETTLE_S = 2e-3
"""Untimed calls at the start of a turn: with 0.5 ms the MLP was still 2 to 6 % slower than in a loop of its own."""
SWITCH_S = 0.2e-3
WARM_UP_SHARE = 0.15
MOST_ROUNDS = FIRST_LOOK * 2**8
"""More rounds than these sharpen nothing: what is left then is not noise of the samples."""


class Lane(Protocol):
    """What the race needs of a contestant: `measure.contestant.Contestant` holding a `measure.stopwatch.Stopwatch`."""

    name: str

    def ask(self, request: str, /, **arguments: Any) -> Any:
        """The answer to a request."""


@dataclass(frozen=True)
class Plan:
    """How long a race may take and when it has its answer. `calls`: timed calls per contestant, in all."""

    baseline: str
    half_width: float
    budget_s: float
    calls: int | None = None
    seed: int = 0
    resamples: int = 500
    single_calls: bool = False
    """One call a turn, where something is done before each (emptying caches)."""


@dataclass
class Record:
    """What a race found: samples in seconds per call, one a round, of every contestant that finished."""

    seconds: dict[str, Samples] = field(default_factory=dict)
    returned: dict[str, Samples] = field(default_factory=dict)
    """Seconds per call until the last call had returned: less than `seconds` where devices work asynchronously."""
    device: dict[str, Samples] = field(default_factory=dict)
    """Seconds per call by the device's own clock, where it has one."""
    calls: dict[str, Samples] = field(default_factory=dict)
    """Calls that each sample is the mean of."""
    calls_per_sample: dict[str, int] = field(default_factory=dict)
    warm_up: dict[str, Samples] = field(default_factory=dict)
    flat: dict[str, bool] = field(default_factory=dict)
    first_call_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, ContestantFailed] = field(default_factory=dict)
    ratios: dict[str, statistics.Ratio] = field(default_factory=dict)
    """Of every contestant against the baseline; filled in when the race is first judged."""
    stopped_by: Literal["precision", "budget", "calls", "rounds"] = "budget"
    alpha: float = ALPHA
    spent_s: float = 0.0

    @property
    def rounds(self) -> int:
        """Complete rounds: samples of each contestant."""
        return max((len(s) for s in self.seconds.values()), default=0)


def race(
    lanes: list[Lane], key: str, plan: Plan, on_round: Callable[[int, int | None, float], None] = lambda *_: None
) -> Record:
    """Race `lanes` at the measuring point `key`. `on_round(done, total, eta_s)` is told after every round.

    A contestant that fails drops out and is named in `failed`; when the baseline fails, its failure is raised.
    """
    return _Race(lanes, key, plan, on_round).run()


class _Race:
    """The state of one race, gathered so that its steps can be read one by one."""

    def __init__(
        self, lanes: list[Lane], key: str, plan: Plan, on_round: Callable[[int, int | None, float], None]
    ) -> None:
        self.lanes, self.key, self.plan, self.on_round = list(lanes), key, plan, on_round
        self.random = random.Random(plan.seed)
        self.record = Record()
        self.call_s: dict[str, float] = {}
        self.start_s = time.perf_counter()

    @property
    def left_s(self) -> float:
        return self.plan.budget_s - (time.perf_counter() - self.start_s)

    def run(self) -> Record:
        self._warm_up()
        self._choose_blocks()
        self._rounds()
        self.record.spent_s = time.perf_counter() - self.start_s
        return self.record

    def _ask(self, lane: Lane, request: str, **arguments: Any) -> Any:
        try:
            return lane.ask(request, key=self.key, **arguments)
        except ContestantFailed as failure:
            if lane.name == self.plan.baseline:
                raise
            self.record.failed[lane.name] = failure
            self.lanes.remove(lane)
            return None

    def _warm_up(self) -> None:
        for lane in self.random.sample(self.lanes, len(self.lanes)):
            first_call_s = self._ask(lane, "first_call")
            if first_call_s is None:
                continue
            limit_s = max(0.0, self.left_s) * WARM_UP_SHARE / max(1, len(self.lanes) - len(self.call_s))
            if limit_s > 0:
                warm = self._ask(lane, "warm_up", limit_s=limit_s)
            else:  # earlier points took it all: this one is to cost no more than its samples
                warm = {"samples_s": [], "flat": False, "call_s": first_call_s}
            if warm is None:
                continue
            self.record.first_call_s[lane.name] = first_call_s
            self.record.warm_up[lane.name] = np.array(warm["samples_s"])
            self.record.flat[lane.name] = warm["flat"]
            self.call_s[lane.name] = warm["call_s"]

    def _choose_blocks(self) -> None:
        """Calls per turn: as many as fill 2 ms, fewer where the budget would not hold 30 rounds of that."""
        names = [lane.name for lane in self.lanes]
        share_s = max(0.0, max(self.left_s, 0.0) / FIRST_LOOK / max(len(names), 1) - SWITCH_S)
        block_s = min(BLOCK_S, max(share_s - SETTLE_S, share_s / 2))
        if self.plan.calls is not None:
            block_s = min(block_s, self.plan.calls / FIRST_LOOK * min(self.call_s[name] for name in names))
        if self.plan.single_calls:
            block_s = 0.0
        self.blocks = {name: max(1, round(block_s / self.call_s[name])) for name in names}
        if self.plan.calls is None:
            self.sizes: list[int] | None = None
        else:
            self.sizes = split(self.plan.calls, max(1, min(self.blocks.values())))
            self.blocks = dict.fromkeys(names, self.sizes[0])
        self.record.calls_per_sample = self.blocks

    def _rounds(self) -> None:
        names = [lane.name for lane in self.lanes]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        returned: dict[str, list[float]] = {name: [] for name in names}
        device: dict[str, list[float]] = {name: [] for name in names}
        counts: dict[str, list[int]] = {name: [] for name in names}
        most = len(self.sizes) if self.sizes else None
        # All but the last look are taken on the way; the last is the final analysis, wherever the budget puts it.
        *looks, (_, last_alpha) = [(0, ALPHA)] if self.sizes else self._looks()
        rounds_start_s, done, longest_s = time.perf_counter(), 0, 0.0
        self.record.stopped_by = "calls" if self.sizes else "budget"
        while most is None or done < most:
            if done and self.left_s < longest_s:
                self.record.stopped_by = "budget"
                break
            round_start_s = time.perf_counter()
            for lane in self.random.sample(self.lanes, len(self.lanes)):
                calls = self.sizes[done] if self.sizes else self.blocks[lane.name]
                settle_s = min(SETTLE_S, calls * self.call_s[lane.name])  # no more than is timed
                took = self._ask(lane, "turn", calls=calls, settle_s=settle_s, call_s=self.call_s[lane.name])
                if took is not None:
                    seconds[lane.name].append(took[0] / calls)
                    returned[lane.name].append(took[1] / calls)
                    device[lane.name] += [took[2] / calls] if len(took) > 2 else []
                    counts[lane.name].append(calls)
            done += 1
            now_s = time.perf_counter()
            longest_s = now_s - round_start_s if done == 1 else max(0.9 * longest_s, now_s - round_start_s)
            pace_s = (now_s - rounds_start_s) / done
            if looks and done == looks[0][0]:
                _, self.record.alpha = looks.pop(0)
                if self._sharp(seconds, self.record.alpha):
                    self.record.stopped_by = "precision"
                    break
            if done == MOST_ROUNDS and not self.sizes:
                self.record.stopped_by = "rounds"
                break
            self._tell(done, most, pace_s)
        kept = {lane.name for lane in self.lanes}
        self.record.seconds = {name: np.array(samples) for name, samples in seconds.items() if name in kept}
        self.record.returned = {name: np.array(samples) for name, samples in returned.items() if name in kept}
        self.record.device = {name: np.array(samples) for name, samples in device.items() if name in kept and samples}
        self.record.calls = {name: np.array(sizes) for name, sizes in counts.items() if name in kept}
        if self.record.stopped_by != "precision":
            self.record.alpha = last_alpha + sum(alpha for _, alpha in looks)
        self._tell(done, done, 0.0)

    def _looks(self) -> list[tuple[int, float]]:
        """The looks that fit into what is left of the budget, from the time that a round is expected to take."""
        blocks_s = [self.blocks[name] * self.call_s[name] for name in self.blocks]
        turns = (block_s + min(SETTLE_S, block_s) + SWITCH_S for block_s in blocks_s)
        fitting = max(1, math.floor(max(self.left_s, 0.0) / sum(turns)))
        return list(statistics.looks(min(fitting, MOST_ROUNDS)))

    def _sharp(self, seconds: dict[str, list[float]], alpha: float) -> bool:
        """Whether the interval of every comparison with the baseline is as narrow as was asked.

        A cheap look first; what it lets through is looked at as the result will be, or the two could disagree.
        """
        against = np.array(seconds[self.plan.baseline])
        return all(
            statistics.compare(
                np.array(seconds[lane.name]), against, alpha=alpha, seed=self.plan.seed, resamples=resamples
            ).half_width
            <= self.plan.half_width
            for resamples in (self.plan.resamples, statistics.RESAMPLES)
            for lane in self.lanes
            if lane.name != self.plan.baseline
        )

    def _tell(self, done: int, most: int | None, pace_s: float) -> None:
        left_s = max(0.0, self.left_s)
        self.on_round(done, most, min(left_s, pace_s * (most - done)) if most is not None else left_s)


def split(calls: int, size: int) -> list[int]:
    """`calls` in blocks of about `size`, at least one; equal where a divisor is near, else differing by one at most."""
    near = [d for d in range(max(1, size * 3 // 4), size * 3 // 2 + 1) if calls % d == 0]
    rounds = calls // min(near, key=lambda d: abs(d - size)) if near else max(1, round(calls / size))
    small, larger = divmod(calls, rounds)
    return [small + 1] * larger + [small] * (rounds - larger)
