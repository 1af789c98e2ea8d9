"""What the part `concurrency` sums up to: k devices at once against one, and the way there, device by device.

    efficiencies(part, record, plan)     # a Figure for 2, 3, ... k devices at once
    curves(part, record, efficiencies)   # compute_rate and speedup over 1, 2, ... k devices

Every device has the same work however many are at it, so T1 / Tj is the efficiency of j devices, and j times that their
speed-up. T1 is that of the best device alone; the first j devices are those at work.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchstone.results import Curve, Figure
from worker.concurrency.lanes import Lane
from worker.concurrency.part import Part
from worker.measure import statistics
from worker.measure.race import Plan, Record


def efficiencies(part: Part, record: Record, plan: Plan) -> list[Figure]:
    """So many at once against the best device alone: 1 where none disturbs another."""
    best, *at_once = _by_count(part, record)
    found = []
    for lane in at_once:
        samples = (record.seconds[lane.name], record.seconds[best.name])
        ratio = statistics.compare(*samples, alpha=record.alpha, seed=plan.seed)
        told = {
            "name": "scaling_efficiency",
            "of": lane.of,
            "at": {"devices": lane.at["devices"]},
            "value": ratio.ratio,
            "unit": "1",
            "ci95": statistics.finite(ratio.interval),
            "method": f"T1/Tn of medians, each device with the same work; T1 is rank {best.at['rank']} alone",
        }
        found.append(Figure.model_validate(told))
    return found


def curves(part: Part, record: Record, found: list[Figure]) -> list[Curve]:
    """From medians, over 1, 2, ... k devices: FLOP/s of all together, and how many times one device's that is.

    The speed-up's intervals are those of the `efficiencies` found, times as many devices.
    """
    lanes = _by_count(part, record)
    work = [lane.work for lane in lanes if lane.work is not None]
    rates = [each.flop / _median(record, lane) for each, lane in zip(work, lanes, strict=True)]
    x = [float(lane.at["devices"]) for lane in lanes]
    ends = [getattr(figure, "ci95", None) for figure in found]
    within = [end and (devices * end[0], devices * end[1]) for devices, end in zip(x[1:], ends, strict=True)]
    told: dict[str, Any] = {"of": "concurrent", "x_name": "devices", "x": x}
    return [
        Curve(name="compute_rate", y_name="FLOP/s", y=[*rates], **told),
        Curve(name="speedup", y_name="speed-up", y=[r / rates[0] for r in rates], ci95=[None, *within], **told),
    ]


def _by_count(part: Part, record: Record) -> list[Lane]:
    """The best device alone, then the lanes of several at once, fewest first."""
    best = min((lane for lane in part.lanes if lane.of == "alone"), key=lambda lane: _median(record, lane))
    at_once = [lane for lane in part.lanes if lane.of == "concurrent"]
    return [best, *sorted(at_once, key=lambda lane: int(lane.at["devices"]))]


def _median(record: Record, lane: Lane) -> float:
    return float(np.median(record.seconds[lane.name]))
