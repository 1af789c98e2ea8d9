"""From races to the rows of a Result: timings, comparisons, the noise floor, and what speaks against them.

    found = judge(record, plan, at={"batch_size": 1}, key="1", wrong={"trace": "one-sided NaN"})
    found.timings, found.comparisons, found.noise_floor, found.codes

The baseline runs twice under two names. The difference seen between the two is this race's noise floor: no contestant
is called faster or slower for less.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchstone.results import Code, Comparison, Figure, Timing
from worker.measure import statistics
from worker.measure.quality import race_codes
from worker.measure.race import Plan, Record

TWIN_SUFFIX = "_again"


@dataclass
class Judgement:
    """What one race says."""

    timings: list[Timing] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    codes: list[Code] = field(default_factory=list)
    noise_floor: float | None = None


def twin_of(baseline: str) -> str:
    """The second name of the baseline."""
    return baseline + TWIN_SUFFIX


def judge(
    record: Record,
    plan: Plan,
    at: dict[str, Any],
    key: str,
    wrong: dict[str, str],
    builds: dict[str, dict[str, Any]],
    name: str = "latency",
) -> Judgement:
    """Rows for every contestant that finished.

    `wrong` names those whose output was not right, and why: no speed-up. `builds` has `build_s` and `build_warm_s`
    (seconds; without the second there was nothing to build) of each.
    """
    found = Judgement()
    baseline, twin = plan.baseline, twin_of(plan.baseline)
    against = record.seconds[baseline]
    ratios = record.ratios = record.ratios or {
        of: statistics.compare(seconds, against, alpha=record.alpha, seed=plan.seed)
        for of, seconds in record.seconds.items()
        if of != baseline and len(seconds)
    }
    if twin in ratios:
        found.noise_floor = abs(ratios[twin].ratio - 1)
    delta = max(statistics.SMALLEST_DELTA, found.noise_floor or 0.0)
    for of, seconds in record.seconds.items():
        found.timings.append(
            Timing(
                name=name if of != twin else "noise",
                of=of,
                at=at,
                **statistics.summarise(seconds),
                first_call_s=record.first_call_s[of],
                build_cold_s=_cold(builds[of]),
                build_warm_s=builds[of].get("build_warm_s"),
                calls_per_sample=record.calls_per_sample[of],
                samples=f"samples.npz#{of}/{key}",
            )
        )
    found.timings += _device_timings(record, at, key, but=twin)
    for of, ratio in ratios.items():
        withheld = wrong.get(of) or wrong.get(baseline) or None
        cold_s, warm_s = _cold(builds[of]), builds[of].get("build_warm_s")
        verdict = "withheld" if withheld else statistics.verdict(ratio.interval, delta)
        hidden = None if of == twin else statistics.hidden_by_noise(ratio.interval, found.noise_floor)
        # Where it is not known that a call saves something, nothing is known to be paid back.
        pays = verdict == "faster" and cold_s is not None and ratio.saved > 0
        if pays:
            found.figures += _break_even(ratio, cold_s, name="break_even_calls_cold", of=of, at=at)
            found.figures += _break_even(ratio, warm_s, name="break_even_calls_warm", of=of, at=at)
        found.comparisons.append(
            Comparison(
                name=name if of != twin else "noise",
                of=of,
                against=baseline,
                at=at,
                speedup=None if withheld else ratio.ratio,
                ci95=None if withheld else statistics.finite(ratio.interval),
                p10_speedup=None if withheld else ratio.p10_ratio,
                noise_floor=found.noise_floor,
                verdict=verdict,
                reason=withheld or hidden,
                break_even_calls=cold_s / ratio.saved if pays and cold_s is not None else None,
            )
        )
    worst = max((ratio.half_width for of, ratio in ratios.items() if of != twin), default=None)
    if worst is not None and len(against) >= statistics.FEWEST_ROUNDS:
        effect = statistics.smallest_detectable_effect(delta, worst)
        found.figures.append(Figure(name="smallest_detectable_effect", of=baseline, at=at, value=effect, unit="1"))
    found.codes = race_codes(record, plan, at, found.noise_floor, worst)
    return found


def _device_timings(record: Record, at: dict[str, Any], key: str, but: str) -> list[Timing]:
    """Where devices work behind the caller's back: the time until calls returned, and the device's own."""
    rows = []
    for name, samples_of in (("dispatch", record.returned if record.device else {}), ("device", record.device)):
        suffix = "returned" if name == "dispatch" else "device"
        for of, samples in samples_of.items():
            if of != but:
                told = statistics.summarise(samples)
                rows.append(Timing(name=name, of=of, at=at, **told, samples=f"samples.npz#{of}/{key}/{suffix}"))
    return rows


def _cold(build: dict[str, Any]) -> float | None:
    return build["build_s"] if build.get("build_warm_s") is not None else None


def _break_even(ratio: statistics.Ratio, build_s: float | None, **names: Any) -> list[Figure]:
    """Calls after which building has paid for itself: build / (t_baseline - t_variant), with its interval.

    Where the interval of the difference reaches zero there is no upper end.
    """
    if build_s is None:
        return []
    low_s, high_s = ratio.saved_interval
    ends = [build_s / high_s, build_s / low_s if low_s > 0 else None]
    return [Figure.model_validate({"value": build_s / ratio.saved, "unit": "calls", "ci95": ends, **names})]
