"""From races to the rows of a Result: timings, comparisons, timelines, and what sums an overlap up.

    judged = judge(part, record, plan)            # codes, noise floor; rows go into the result
    told = overlap(record, "compute", "copy", "overlapped", seed=0)   # {"value": 0.9, "bound": "compute", ...}
    known(told)                                    # value null, with a reason, where it would say nothing

overlap: eta = (t_compute + t_copy - t_both) / min(t_compute, t_copy), at most 1; of medians, with the interval of a
bootstrap over rounds.
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
from worker.measure.rows import twin_of

HANDOVER_SHARE = 0.2
"""By how much `sequential` may exceed the sum of the runs alone before something else is a part of what it measures."""
WHY_NOT_FASTER = "sequential took longer than its runs alone: see handover_counts"

WIDEST = 1.0
"""An overlap whose interval is as wide as from none to all of it is not known."""


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
    noise_floor = abs(_ratio(record, plan, twin, part.baseline).ratio - 1)
    waits = handover(part, record)
    for lane in part.lanes:
        result.timings.append(_timing(lane, part, record, "noise" if lane.name == twin else lane.timing))
        if lane.name != twin:
            result.spans += _spans(lane, part)
    by_name = {lane.name: lane for lane in part.lanes}
    half_widths, effects = [], []
    for of, against in (*part.pairs, (twin, part.baseline)):
        ratio = _ratio(record, plan, of, against)
        floor = noise_floor if of == twin else _floor(part, record, against, noise_floor)
        delta = max(statistics.SMALLEST_DELTA, floor)
        if of != twin:
            half_widths.append(ratio.half_width)
            effects.append(statistics.smallest_detectable_effect(delta, ratio.half_width))
        verdict, reason = statistics.verdict(ratio.interval, delta), None
        if waits and (of, against) == ("concurrent", "sequential"):
            verdict, reason = "inconclusive", WHY_NOT_FASTER
        elif verdict == "faster" and of in part.cannot_win:
            verdict, reason = "inconclusive", part.cannot_win[of]
        elif of != twin:
            reason = statistics.hidden_by_noise(ratio.interval, floor)
        lane = by_name[of]
        at = {"part": part.name, **lane.at}
        result.comparisons.append(
            Comparison(
                name="noise" if of == twin else lane.timing,
                of=lane.of,
                against=by_name[against].of,
                at=at,
                speedup=ratio.ratio,
                ci95=statistics.finite(ratio.interval),
                p10_speedup=ratio.p10_ratio,
                noise_floor=floor,
                verdict=verdict,
                reason=reason,
            )
        )
    worst = max(half_widths) if record.rounds >= statistics.FEWEST_ROUNDS else None
    if worst is not None:
        result.figures.append(
            Figure(name="smallest_detectable_effect", of=part.baseline, at=part.at, value=max(effects), unit="1")
        )
    at = {"part": part.name, **part.at}
    return Judged(waits + race_codes(record, plan, at, noise_floor, worst), noise_floor)


def handover(part: Part, record: Record) -> list[Code]:
    """`sequential` is each device's run, one after another. Where it takes much longer than those runs alone together,
    it contains what they do not (passing the turn, waking up, a disturbed machine): being faster than that is not yet
    working at once. `between_s`: what of it was not the devices' own work."""
    alone = [float(np.median(record.seconds[lane.name])) for lane in part.lanes if lane.of == "alone"]
    if "sequential" not in record.seconds or not alone:
        return []
    sequential_s = float(np.median(record.seconds["sequential"]))
    if sequential_s <= (1 + HANDOVER_SHARE) * sum(alone):
        return []
    [samples] = [lane.samples for lane in part.lanes if lane.name == "sequential"]
    between = [s.seconds - sum(piece.end_s - piece.start_s for piece in s.pieces) for s in samples]
    evidence = {
        "at": {"part": part.name, **part.at},
        "sequential_s": sequential_s,
        "sum_of_alone_s": sum(alone),
        "between_s": float(np.median(between)),
        "allowed_share": HANDOVER_SHARE,
    }
    return [Code(code="handover_counts", severity="warning", evidence=evidence)]


def _floor(part: Part, record: Record, against: str, noise_floor: float) -> float:
    """What a difference from `against` must exceed.

    A baseline without a twin, and one of few rounds, whose twin may have met it by chance, are no better known than the
    interval of their own median; under 6 rounds there is none, and no verdict either.
    """
    if against == part.baseline and record.rounds >= statistics.FIRST_LOOK:
        return noise_floor
    samples = record.seconds[against]
    interval = statistics.median_interval(samples)
    own = 0.0 if interval is None else (interval[1] - interval[0]) / (2 * float(np.median(samples)))
    return max(noise_floor, own)


def overlap(record: Record, compute: str, copy: str, both: str, seed: int) -> dict[str, Any]:
    """eta with its interval (null under 6 rounds), and what bounds `both` from below.

    `value` and `ci95` are at most 1; `raw` and `raw_ci95` are what the medians made of it.
    """
    samples = [record.seconds[name] for name in (compute, copy, both)]
    medians = [float(np.median(each)) for each in samples]
    raw, interval = float(_eta(*medians)), None
    if record.rounds >= statistics.FEWEST_ROUNDS:
        block = statistics.block_length(*samples)
        drawn = statistics.resampled_medians(np.stack(samples), block, seed, statistics.RESAMPLES)
        low, high = np.percentile(_eta(*drawn), [2.5, 97.5])
        interval = [float(low), float(high)]
    bound = "compute" if medians[0] >= medians[1] else "copy"
    method = f"(compute + copy - both) / min(compute, copy), of medians; both takes at least its {bound}"
    if raw > 1:
        method += f"; at most 1: the medians make {raw:.4g}"
    return {
        "value": min(1.0, raw),
        "ci95": interval and [min(1.0, end) for end in interval],
        "raw": raw,
        "raw_ci95": interval,
        "bound": bound,
        "bound_s": max(medians[:2]),
        "compute_s": medians[0],
        "copy_s": medians[1],
        "both_s": medians[2],
        "method": method,
    }


def known(told: dict[str, Any], shared: str | None = None) -> dict[str, Any]:
    """An overlap's fields, with a reason in place of a value that would say nothing.

    `shared`: the only device, on whose cores both computing and copying had to run.
    """
    ends, raw = told["raw_ci95"], f"the medians make {told['raw']:.4g}"
    if shared is not None:
        reason = f"computing and copying share the cores of {shared}, so neither can hide the other; {raw}"
    elif ends is None:
        reason = f"fewer than {statistics.FEWEST_ROUNDS} rounds, which give no interval; {raw}"
    elif ends[1] - ends[0] > WIDEST:
        reason = f"the 95 % interval, {ends[0]:.4g} .. {ends[1]:.4g}, is wider than 1 and says nothing; {raw}"
    else:
        return told
    return {**told, "value": None, "ci95": None, "reason": reason}


def _eta(compute: Any, copy: Any, both: Any) -> Any:
    return (compute + copy - both) / np.minimum(compute, copy)


def _ratio(record: Record, plan: Plan, of: str, against: str) -> statistics.Ratio:
    return statistics.compare(record.seconds[of], record.seconds[against], alpha=record.alpha, seed=plan.seed)


def _timing(lane: Lane, part: Part, record: Record, name: str) -> Timing:
    return Timing(
        name=name,
        of=lane.of,
        at={"part": part.name, **lane.at},
        **statistics.summarise(record.seconds[lane.name]),
        first_call_s=record.first_call_s[lane.name],
        samples=f"samples.npz#{lane.name}/{key_of(part)}",
    )


def _spans(lane: Lane, part: Part) -> list[Span]:
    at = {"part": part.name, **lane.at}
    return [
        Span(name=piece.name, of=lane.of, at={**at, **piece.at}, start_s=piece.start_s, end_s=piece.end_s)
        for piece in lane.typical.pieces
    ]
