"""The races of one part: its contestants at all of its points, a second heat where the first is doubtful and cheap.

    with Contest(stage, "barriers", baseline="no_barrier", budget_s=4) as contest:
        contest.start("no_barrier", lambda: Reader(...))
        contest.start("item", lambda: Reader(...))
        contest.race([Point("32", {"size": 32})])
        contest.judge({"item": {"32": "it read another number"}})

The baseline runs twice, under two names. Keys of races, and of samples, are PART/POINT.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torchstone.results import Code, Comparison, Timing
from worker.asynchrony.stage import Stage
from worker.contestants.field import Field, job_error
from worker.measure import statistics
from worker.measure.contestant import Contestant, ContestantFailed
from worker.measure.environment import Load, frequency_mhz
from worker.measure.heat import SET_ASIDE, Heat, choose, may_repeat
from worker.measure.quality import load_codes, mode_codes
from worker.measure.race import Plan, Record, race
from worker.measure.rows import judge, twin_of


@dataclass(frozen=True)
class Point:
    """Where a race is run: its key among those of the part, and what the rows say of it."""

    key: str
    at: dict[str, Any] = field(default_factory=dict)


class Contest(Field):
    """The contestants of one part; leaving it ends their processes."""

    def __init__(self, stage: Stage, part: str, baseline: str, budget_s: float) -> None:
        super().__init__(stage.bench.cores, stage.threads, baseline, stage.result)
        self.stage, self.part, self.budget_s = stage, part, budget_s
        self.twin = twin_of(baseline)
        self.points: list[Point] = []
        self.heat = Heat({}, {})

    def start(self, name: str, make: Callable[[], object]) -> None:
        """A process for `name`, and one for its twin where it is the baseline."""
        for who in (name, self.twin) if name == self.baseline else (name,):
            super().start(who, make)

    def start_on(self, name: str, make: Callable[[], object], cores: tuple[int, ...], threads: int) -> None:
        """A process for `name` on these cores, without a twin."""
        self.contestants[name] = Contestant.start(name, make, cores, threads)

    def key(self, point: Point) -> str:
        """What its race and its samples are called."""
        return f"{self.part}/{point.key}"

    def check_modes(self) -> None:
        """Contestants that run otherwise than the baseline does make the result invalid."""
        modes = {name: told for name in self.names if (told := self.attempt(name, "facts"))}
        self.stage.codes += mode_codes(modes, self.baseline)

    def race(self, points: list[Point]) -> None:
        """Race all contestants at every point; a doubtful heat is run once more where the budget has room."""
        self.points = points
        end_s = time.perf_counter() + self.budget_s
        first, second = self._heat(end_s, 0), None
        if may_repeat(first, end_s - time.perf_counter()):
            print("  doubtful and cheap: once more", flush=True)
            second = self._heat(end_s, len(points))
        self.heat, aside, codes = choose(first, second)
        for code in codes:
            code.evidence["part"] = self.part
        self.stage.host["during"][self.part] = self.heat.during
        self.stage.codes += self.heat.codes + codes
        self.stage.races |= self.heat.races
        if aside is not None:
            self.stage.races |= {f"{key}/{SET_ASIDE}": made for key, made in aside.races.items()}

    def unfinished(self) -> dict[str, dict[str, str]]:
        """Why those that failed in or after a race get no speed-up, by name and point: not all of it was checked."""
        reason = "it failed before all of it was checked: see what was not measured"
        timed = {name for record, _ in self.heat.races.values() for name in record.seconds}
        return {name: {point.key: reason for point in self.points} for name in timed - set(self.names)}

    def record(self, point: Point) -> Record:
        """What the race at `point` found."""
        return self.heat.races[self.key(point)][0]

    def judge(self, wrong: dict[str, dict[str, str]], uncompared: Collection[str] = ()) -> list[Timing]:
        """Rows for every contestant at every point; those for this part's own name are returned.

        `wrong`: why a contestant gets no speed-up, by name and point. `uncompared` do other work than the baseline:
        they are timed and not compared.
        """
        found = []
        for point in self.points:
            record, plan = self.heat.races[self.key(point)]
            reasons = {name: by_point.get(point.key, "") for name, by_point in wrong.items()}
            builds: dict[str, dict[str, Any]] = {name: {} for name in record.seconds}
            told = judge(record, plan, point.at, self.key(point), reasons, builds, self.part)
            self.result.timings += told.timings
            self.result.comparisons += [row for row in told.comparisons if row.of not in uncompared]
            self.result.figures += told.figures
            self.stage.floors += [told.noise_floor] if told.noise_floor is not None else []
            found += [row for row in told.timings if row.name == self.part]
        return found

    def compare(self, of: str, against: str, point: Point, wrong: dict[str, dict[str, str]]) -> Comparison | None:
        """A comparison of two that are both not the baseline; None where one of them is gone."""
        record, plan = self.heat.races[self.key(point)]
        if of not in record.seconds or against not in record.seconds:
            return None
        ratio = statistics.compare(record.seconds[of], record.seconds[against], alpha=record.alpha, seed=plan.seed)
        floor = self._floor(record, plan)
        withheld = wrong.get(of, {}).get(point.key) or wrong.get(against, {}).get(point.key)
        row = Comparison(
            name=self.part,
            of=of,
            against=against,
            at=point.at,
            speedup=None if withheld else ratio.ratio,
            ci95=None if withheld else statistics.finite(ratio.interval),
            p10_speedup=None if withheld else ratio.p10_ratio,
            noise_floor=floor,
            verdict="withheld"
            if withheld
            else statistics.verdict(ratio.interval, max(statistics.SMALLEST_DELTA, floor or 0.0)),
            reason=withheld or statistics.hidden_by_noise(ratio.interval, floor),
        )
        self.result.comparisons.append(row)
        return row

    def _floor(self, record: Record, plan: Plan) -> float | None:
        if self.twin not in record.seconds:
            return None
        return abs(
            statistics.compare(record.seconds[self.twin], record.seconds[self.baseline], seed=plan.seed).ratio - 1
        )

    def _heat(self, end_s: float, first_seed: int) -> Heat:
        frequency_before_mhz, before = frequency_mhz(self.cores[0]), Load.now(self.cores, self.pids)
        heat = Heat({}, {})
        spec = self.stage.spec
        for index, point in enumerate(self.points):
            left_s = max(0.0, end_s - time.perf_counter()) / (len(self.points) - index)
            plan = Plan(self.baseline, spec.ci_half_width, left_s, spec.calls, seed=spec.seed + first_seed + index)
            place = ", ".join([self.part, *(f"{key}={value}" for key, value in point.at.items())])
            self.stage.say(f"{place}: racing for at most {left_s:.1f} s")
            key = self.key(point)
            try:
                record = race(list(self.contestants.values()), key, plan, self.stage.progress_of(place))
            except ContestantFailed as failure:
                raise job_error(failure, f"{self.part}: the baseline {self.baseline} failed: ") from failure
            for name, failed in record.failed.items():
                self.drop(name, failed)
            heat.races[key] = (record, plan)
            print(f"  {record.rounds} rounds in {record.spent_s:.2f} s, stopped by {record.stopped_by}", flush=True)
        heat.during = Load.now(self.cores, self.pids).since(before)
        heat.codes = load_codes(heat.during, (frequency_before_mhz, frequency_mhz(self.cores[0])))
        for point in self.points:
            record, plan = heat.races[self.key(point)]
            found = judge(record, plan, point.at, self.key(point), {}, {name: {} for name in record.seconds})
            heat.codes += found.codes
            heat.noise_floor = max(heat.noise_floor or 0.0, found.noise_floor or 0.0)
        heat.codes = [within(self.part, code) for code in heat.codes]
        return heat


def within(part: str, code: Code) -> Code:
    """The same code, which says in which part it was seen."""
    return code.model_copy(update={"evidence": {"part": part, **code.evidence}})
