"""From races to the rows of a Result: timings, comparisons, timelines, and the two figures that sum them up.

    judged = judge(part, record, plan)            # codes, noise floor; rows go into the result
    overlap(record, "compute", "copy", "overlapped", seed=0)      # {"value": 0.9, "bound": "compute", ...}

overlap: eta = (t_compute + t_copy - t_both) / min(t_compute, t_copy), at most 1; of medians, with the interval of a
bootstrap over rounds. scaling_efficiency: the best device alone over all at once, since each has the same work in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchstone.results import Code, Comparison, Figure, Result, Span, Timing
from worker.concurrency.lanes import Lane
from worker.concurrency.part import Part
from worker.measure import statistics
from worker.measure.quality import race_codes
from worker.measure.race import Plan, Record
from worker.measure.rows import SMALLEST_DELTA, twin_of


@dataclass(frozen=True)
class Judged:
    """What speaks against one race."""

    codes: list[Code]
    noise_floor: float | None


def key_of(part: Part) -> str:
    """The race's place in samples.npz."""
    return "/".join([part.name, *map(str, part.at.values())])


def judge(result: Result, part: Part, record: Record, plan: Plan) -> Judged:
    """Put the rows of a race into `result`."""
    twin = twin_of(part.baseline)
    floor_ratio = _ratio(record, plan, twin, part.baseline)
    noise_floor = abs(floor_ratio.ratio - 1)
    delta = max(SMALLEST_DELTA, noise_floor)
    for lane in part.lanes:
        result.timings.append(_timing(lane, part, record, "noise" if lane.name == twin else lane.timing))
        if lane.name != twin:
            result.spans += _spans(lane)
    by_name = {lane.name: lane for lane in part.lanes}
    half_widths = []
    for of, against in (*part.pairs, (twin, part.baseline)):
        ratio = _ratio(record, plan, of, against)
        half_widths += [ratio.half_width] if of != twin else []
        lane = by_name[of]
        result.comparisons.append(
            Comparison(
                name="noise" if of == twin else lane.timing,
                of=lane.of,
                against=by_name[against].of,
                at=lane.at,
                speedup=ratio.ratio,
                ci95=statistics.finite(ratio.interval),
                p10_speedup=ratio.p10_ratio,
                noise_floor=noise_floor,
                verdict=statistics.verdict(ratio.interval, delta),
            )
        )
    worst = max(half_widths) if record.rounds >= statistics.FEWEST_ROUNDS else None
    if worst is not None:
        effect = statistics.smallest_detectable_effect(delta, worst)
        result.figures.append(
            Figure(name="smallest_detectable_effect", of=part.baseline, at=part.at, value=effect, unit="1")
        )
    at = {"part": part.name, **part.at}
    return Judged(race_codes(record, plan, at, noise_floor, worst), noise_floor)


def efficiency(record: Record, plan: Plan, devices: int) -> Figure:
    """All at once against the best device alone: 1 where none disturbs another."""
    alone = {name: samples for name, samples in record.seconds.items() if name.startswith("alone/")}
    best = min(alone, key=lambda name: float(np.median(alone[name])))
    ratio = _ratio(record, plan, "concurrent", best)
    told = {
        "name": "scaling_efficiency",
        "of": "concurrent",
        "at": {"devices": devices},
        "value": ratio.ratio,
        "unit": "1",
        "ci95": statistics.finite(ratio.interval),
        "method": f"T1/Tn of medians, each device with the same work; T1 is rank {best.partition('/')[2]} alone",
    }
    return Figure.model_validate(told)


def overlap(record: Record, compute: str, copy: str, both: str, seed: int) -> dict[str, Any]:
    """eta with its interval (null under 6 rounds), and what bounds `both` from below."""
    samples = [record.seconds[name] for name in (compute, copy, both)]
    medians = [float(np.median(each)) for each in samples]
    interval = None
    if record.rounds >= statistics.FEWEST_ROUNDS:
        block = statistics.block_length(*samples)
        drawn = statistics.resampled_medians(np.stack(samples), block, seed, statistics.RESAMPLES)
        low, high = np.percentile(_eta(*drawn), [2.5, 97.5])
        interval = [float(low), float(high)]
    bound = "compute" if medians[0] >= medians[1] else "copy"
    return {
        "value": float(_eta(*(np.array(m) for m in medians))),
        "ci95": interval,
        "bound": bound,
        "bound_s": max(medians[:2]),
        "compute_s": medians[0],
        "copy_s": medians[1],
        "both_s": medians[2],
        "method": f"(compute + copy - both) / min(compute, copy), of medians; both takes at least its {bound}",
    }


def _eta(compute: Any, copy: Any, both: Any) -> Any:
    return np.minimum(1.0, (compute + copy - both) / np.minimum(compute, copy))


def _ratio(record: Record, plan: Plan, of: str, against: str) -> statistics.Ratio:
    return statistics.compare(record.seconds[of], record.seconds[against], alpha=record.alpha, seed=plan.seed)


def _timing(lane: Lane, part: Part, record: Record, name: str) -> Timing:
    return Timing(
        name=name,
        of=lane.of,
        at=lane.at,
        **statistics.summarise(record.seconds[lane.name]),
        first_call_s=record.first_call_s[lane.name],
        samples=f"samples.npz#{lane.name}/{key_of(part)}",
    )


def _spans(lane: Lane) -> list[Span]:
    return [
        Span(name=piece.name, of=lane.of, at={**lane.at, **piece.at}, start_s=piece.start_s, end_s=piece.end_s)
        for piece in lane.typical.pieces
    ]
