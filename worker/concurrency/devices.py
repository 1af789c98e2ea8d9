"""The part `concurrency`: run(x) on each device alone, on one after another, on all at once, and on 2, 3, ... at once.

    part = on_cpu(crew, assigned, checked)
    [lane.name for lane in part.lanes]     # alone/0, alone/1, sequential, sequential_again, concurrent, two_streams;
                                           # with a third device also alone/2 and concurrent/2
    record = race(part.lanes, ...)
    efficiency = best alone / concurrent   # each device has the same work whether alone or not

A run counts from the order to the moment at which the last device is done with its last product: every device that has
work is waited for. What the order itself takes (a message to a process, about 0.1 ms) is in all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from worker.concurrency.crew import Crew
from worker.concurrency.lanes import Lane, Piece, Sample
from worker.concurrency.part import Assigned, Checked, Part
from worker.concurrency.products import TOLERANCE, Products, work_of
from worker.measure.rows import twin_of

SEQUENTIAL = "sequential"
Order = Callable[[list[int], bool], Sample]


def on_cpu(crew: Crew, assigned: Assigned, checked: Checked) -> Part:
    """A process for each device, pinned to its cores."""
    spec = assigned.spec
    names = [device.name for device in assigned.devices]

    for rank, name in enumerate(names):
        make = partial(Products, assigned.size, assigned.repeats, spec.dtype, spec.seed + rank)
        crew.start(name, make, assigned.devices[rank].cores, assigned.threads(rank))
    for name, told in zip(names, crew.ask_all(names, "prepare"), strict=True):
        checked.right(name, told, TOLERANCE[spec.dtype])

    def order(ranks: list[int], at_once: bool) -> Sample:
        asked = [names[rank] for rank in ranks]
        begun_s = time.perf_counter()
        spans = crew.ask_all(asked, "run") if at_once else [crew.ask(name, "run") for name in asked]
        return _sample(begun_s, dict(zip(ranks, spans, strict=True)))

    def two_streams() -> Sample:
        begun_s = time.perf_counter()
        return _sample(begun_s, {0: crew.ask(names[0], "run", threads=2)})

    def verify(ranks: list[int]) -> list[dict[str, Any]]:
        asked = [names[rank] for rank in ranks]
        return [{**told, "where": name} for told, name in zip(crew.ask_all(asked, "verify"), asked, strict=True)]

    part = _part(assigned, checked, order, two_streams, verify)
    if len(assigned.devices[0].cores) == 1:
        # On a loaded machine they often seem to: half the work ends before the scheduler takes the core away.
        part.cannot_win["two_streams"] = f"two threads on the one core of {names[0]}: only other load makes them faster"
        part.notes.append(
            f"two_streams: {names[0]} has one core, on which two threads can only take turns: 1x is the most"
        )
    return part


def on_cuda(crew: Crew, assigned: Assigned, checked: Checked) -> Part:
    """One process for all GPUs: it queues the work and waits for every device that has some."""
    from worker.concurrency.cuda import GpuProducts

    spec, count = assigned.spec, len(assigned.devices)
    make = partial(GpuProducts, assigned.size, assigned.repeats, spec.dtype, spec.seed, count)
    crew.start("gpus", make, assigned.cores, len(assigned.cores))
    for device, told in zip(assigned.devices, crew.ask("gpus", "prepare"), strict=True):
        checked.right(device.name, told, TOLERANCE[spec.dtype])

    def order(ranks: list[int], at_once: bool, streams: int = 1) -> Sample:
        told = crew.ask("gpus", "run", ranks=ranks, at_once=at_once, streams=streams)
        pieces = [Piece("compute", start, end, {"rank": rank}) for rank, start, end in told["spans"]]
        return Sample(told["seconds"], pieces)

    def verify(ranks: list[int]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = crew.ask("gpus", "verify", ranks=ranks)
        return told

    return _part(assigned, checked, order, lambda: order([0], True, 2), verify)


def _sample(begun_s: float, spans: dict[int, list[list[float]]]) -> Sample:
    """One piece a device, from its first product's begin to its last one's end."""
    pieces = [
        Piece("compute", min(s for s, _ in each) - begun_s, max(e for _, e in each) - begun_s, {"rank": rank})
        for rank, each in spans.items()
    ]
    return Sample(max(piece.end_s for piece in pieces), pieces)


def _part(
    assigned: Assigned,
    checked: Checked,
    order: Order,
    two_streams: Callable[[], Sample],
    verify: Callable[[list[int]], list[dict[str, Any]]],
) -> Part:
    every = list(range(len(assigned.devices)))

    def lane(name: str, of: str, ranks: list[int], run: Callable[[], Sample], at: dict[str, Any]) -> Lane:
        def checked_run() -> Sample:
            sample = run()
            checked.runs("computed_whole", of, verify(ranks), assigned.spec.dtype, at)
            return sample

        work = work_of(assigned.size, assigned.spec.dtype, assigned.repeats * len(ranks))
        return Lane(name, checked_run, "compute", of, at, work=work, ranks=tuple(ranks))

    all_of_them = {"devices": len(every)}
    lanes = [
        lane(f"alone/{rank}", "alone", [rank], partial(order, [rank], True), {"devices": 1, "rank": rank})
        for rank in every
    ]
    for name in (SEQUENTIAL, twin_of(SEQUENTIAL)):
        lanes.append(lane(name, name, every, partial(order, every, False), all_of_them))
    for count in range(2, len(every)):  # on the way to all of them: what is seen as a curve
        some = every[:count]
        lanes.append(lane(f"concurrent/{count}", "concurrent", some, partial(order, some, True), {"devices": count}))
    lanes.append(lane("concurrent", "concurrent", every, partial(order, every, True), all_of_them))
    lanes.append(lane("two_streams", "two_streams", [0], two_streams, {"devices": 1, "rank": 0}))
    pairs = [("concurrent", SEQUENTIAL), ("two_streams", "alone/0")]
    return Part("concurrency", {}, lanes, SEQUENTIAL, pairs, checked)
