"""A part's lanes against what this host was measured to reach, by its `hardware` reports.

    rows = against_ceilings(part, record, assigned, bench.ceilings)
    rows[0].name, rows[0].value        # "roofline", 0.9 of what as many cores reach; null without a report

A lane counts against all the devices that do its work, whether at once or in turns: of k devices one after another
reach a k-th at most. A copy has no FLOP, so it is set against memory's bandwidth alone (`memory_fraction`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchstone.ceilings import Ceilings, Reason
from torchstone.results import Figure
from worker.concurrency.lanes import Lane
from worker.concurrency.part import Assigned, Part
from worker.measure import roofline
from worker.measure.race import Record
from worker.measure.rows import twin_of

OVER_A_LINK = (
    "this copy is limited by the link between host and device, and the ceilings have a device's own memory: "
    "the figures of host_device in the hardware report are its measure"
)


def against_ceilings(part: Part, record: Record, assigned: Assigned, ceilings: Ceilings) -> list[Figure]:
    """A figure for each lane whose work is known, but for the baseline's twin."""
    rows = []
    for lane in part.lanes:
        if lane.work is not None and lane.name != twin_of(part.baseline):
            seconds = float(np.median(record.seconds[lane.name]))
            of_a_copy = lane.work.flop == 0
            rows.append((_memory_fraction if of_a_copy else _roofline)(lane, seconds, assigned, ceilings))
    return rows


def _roofline(lane: Lane, seconds: float, assigned: Assigned, ceilings: Ceilings) -> Figure:
    assert lane.work is not None
    return roofline.point(lane.of, lane.at, lane.work, seconds, ceilings, **_where(lane, assigned))


def _memory_fraction(lane: Lane, seconds: float, assigned: Assigned, ceilings: Ceilings) -> Figure:
    assert lane.work is not None
    row: dict[str, Any] = {"name": "memory_fraction", "of": lane.of, "at": lane.at, "value": None, "unit": "1"}
    row |= {"bytes": lane.work.bytes, "seconds": seconds, "bytes_per_s": lane.work.bytes / seconds}
    ceiling = Reason(OVER_A_LINK) if assigned.is_cuda else ceilings.find("B/s", **_where(lane, assigned))
    if isinstance(ceiling, Reason):
        return Figure.model_validate({**row, "reason": ceiling.text})
    row |= {
        "value": row["bytes_per_s"] / ceiling.value,
        "ceiling_bytes_per_s": ceiling.value,
        "ceiling_job": ceiling.job,
        "ceiling_grade": ceiling.grade,
        "method": "bytes read + written a second, over memory's bandwidth",
    }
    return Figure.model_validate(row | roofline.remark(row["value"], "memory"))


def _where(lane: Lane, assigned: Assigned) -> dict[str, Any]:
    """What `Ceilings.find` is asked: the lane's devices; devices that share cores are no more cores than those."""
    cores = {core for rank in lane.ranks for core in assigned.devices[rank].cores}
    threads = sum(assigned.threads(rank) for rank in lane.ranks)
    return {
        "dtype": assigned.spec.dtype,
        "device_type": assigned.devices[0].type,
        "cores": min(threads, len(cores)),
        "devices": len(lane.ranks),
    }
