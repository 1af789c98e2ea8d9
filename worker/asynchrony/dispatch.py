"""When a call returns against when its result is there: a stream of products, at sizes that double, on every device.

A front end that hands work to a device returns early (dispatch) and the result is there later (completion); one that
does the work itself returns when it is done. Told for each device, with the curve over the size:

- `dispatch` and `completion`: seconds per operation until the last call of a stream returned, and until all were done;
- `returned_share`: which share of the time to completion a call takes to return; 1 = synchronous. On a CPU device,
  which has nothing to wait for, it is found by looking: the output is poisoned before the call, then read until it is
  there;
- `launch_bound_below`: the size under which an operation costs more than its work;
- `queue_depth`: how many operations the front end may be ahead before a call blocks; null where nothing is queued.

On CPU devices a worker thread stands for the device that works by itself: the same stream, handed over through a queue.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from torchstone.asynchrony import Part
from torchstone.results import Check, Code, Curve, Figure, Timing
from worker.asynchrony import feeding
from worker.asynchrony.contest import Contest
from worker.asynchrony.stage import Stage, duration
from worker.asynchrony.streams import Stream, ThroughThread
from worker.asynchrony.sweep import COLUMNS, Sweep
from worker.measure import statistics

PART = Part.dispatch.value
THREAD = "worker_thread"
_SMALLEST = (1, 4, 16)
_TRIALS = 25
_ARRIVAL_S = 0.4
_FEEDING_SHARE = 0.35


def measure(stage: Stage) -> None:
    """The streams on every leased device; on CPU devices also what a thread that works ahead brings."""
    budget_s = stage.budget_s(Part.dispatch)
    shared_s = 0.0 if stage.on_cuda else _FEEDING_SHARE * budget_s
    sizes = sizes_up_to(stage.spec.size)
    first = stage.bench.devices[0]
    with Contest(stage, PART, first.name, budget_s - shared_s) as contest:
        _start(stage, contest, sizes)
        sweep = Sweep(contest, sizes)
        sweep.run()
        for lane in contest.names:
            _tell_lane(stage, contest, sweep, lane)
        _tell_queue(stage, contest)
    if shared_s:
        feeding.measure(stage, shared_s)


def sizes_up_to(size: int) -> list[int]:
    """1, 4, 16, then twice as many each time, and `size`."""
    doubled = [16 * 2**i for i in range(1, max(1, math.ceil(math.log2(max(size, 2)))))]
    smaller = [s for s in (*_SMALLEST, *doubled) if s < size]
    return [*(s for s in smaller if s * 1.4 < size or s == 1), size]


def _start(stage: Stage, contest: Contest, sizes: list[int]) -> None:
    spec = stage.spec
    for index, leased in enumerate(stage.bench.devices):
        device = stage.torch_device(index)
        threads = spec.threads or len(leased.cores)
        make = partial(Stream, sizes, stage.dtype, device, spec.seed)
        contest.start_on(leased.name, make, leased.cores, threads)
    if not stage.on_cuda:
        first = stage.bench.devices[0]
        threads = spec.threads or len(first.cores)
        through = partial(ThroughThread, sizes, stage.dtype, stage.device, spec.seed, threads)
        contest.start_on(THREAD, through, first.cores, threads)


def _tell_lane(stage: Stage, contest: Contest, sweep: Sweep, lane: str) -> None:
    """Rows, curves, figures and checks of one contestant."""
    result, sizes = stage.result, sweep.sizes
    wrong = []
    for size in sizes:
        told = contest.attempt(lane, "check", key=str(size))
        if told is not None:
            row = Check.model_validate({"name": "exact", "of": lane, "against": "known", "at": {"size": size}, **told})
            result.checks.append(row)
            wrong += [] if row.passed else [size]
    for index, what in enumerate(COLUMNS):
        intervals: dict[int, Any] = {}
        for size in sizes:
            samples = sweep.column(lane, size, index)
            if len(samples):
                summary = statistics.summarise(samples)
                intervals[size] = summary["ci95"]
                result.timings.append(
                    Timing(
                        name=what,
                        of=lane,
                        at={"size": size},
                        **summary,
                        first_call_s=sweep.first_call_s[lane, str(size)] if what == "completion" else None,
                        calls_per_sample=sweep.calls[lane, str(size)],
                        samples=f"samples.npz#{lane}/{PART}/{size}/{what}",
                    )
                )
        medians = sweep.medians(lane, index)
        if any(m is not None for m in medians):
            xs = [float(size) for size in sizes]
            ends = {"y": medians, "ci95": [intervals.get(size) for size in sizes]}
            curve = {"name": "time_per_operation", "of": lane, "at": {"time": what}, "x_name": "size", "y_name": "s"}
            result.curves.append(Curve.model_validate({**curve, "x": xs, **ends}))
    if wrong:
        evidence = {"part": PART, "of": lane, "sizes": wrong}
        stage.codes.append(Code(code="wrong_result", severity="error", evidence=evidence))
        return
    _figures(stage, contest, sweep, lane)


def _figures(stage: Stage, contest: Contest, sweep: Sweep, lane: str) -> None:
    result, sizes = stage.result, sweep.sizes
    done, returned, device = (sweep.medians(lane, index) for index in range(3))
    at = {"size": sizes[-1]}
    for name, medians in (("dispatch", returned), ("completion", done)):
        result.figures.append(Figure(name=name, of=lane, at=at, value=medians[-1], unit="s"))
    shares = {}
    for size in (size for size in sizes if size in (1, 64, 256, sizes[-1])):
        share, interval, method = _returned_share(stage, contest, sweep, lane, size)
        shares[size] = share if interval else None
        row = {"name": "returned_share", "of": lane, "at": {"size": size}, "value": share, "unit": "1"}
        result.figures.append(Figure.model_validate({**row, "ci95": interval, "method": method}))
    bound, method = launch_bound_below(sizes, done, device if device[0] is not None else None)
    reason = None if bound else f"even at {sizes[-1]} an operation costs more than its work"
    row = {"name": "launch_bound_below", "of": lane, "value": bound, "unit": "rows", "reason": reason}
    result.figures.append(Figure.model_validate({**row, "method": method}))
    if done[0] is not None:
        cost = f"the smallest operation takes {duration(done[0])}"
        below = f"under about {bound:.0f} rows it is mostly the cost of a call" if bound else str(reason)
        if sweep.rounds < statistics.FEWEST_ROUNDS:
            below = f"{statistics.TOO_FEW} under which size it is mostly the cost of a call"
        last, where = shares.get(sizes[-1]), ""
        if last is not None:
            where = f"at size {sizes[-1]} a call has returned after {100 * last:.4g} % of the time to its result; "
        stage.find(PART, f"{lane}: {where}{cost}, {below}")


def _returned_share(
    stage: Stage, contest: Contest, sweep: Sweep, lane: str, size: int
) -> tuple[float | None, list[float] | None, str]:
    """The median of dispatch over completion, its interval, and how it was found."""
    if not stage.on_cuda and lane != THREAD:
        call_s = float(np.median(sweep.column(lane, size, 0)))
        trials = min(_TRIALS, max(3, int(_ARRIVAL_S / call_s)))
        told = contest.attempt(lane, "arrival", key=str(size), trials=trials)
        if told is None:
            return None, None, "it failed"
        ratio = np.array(told["returned_s"]) / np.array(told["arrived_s"])
        method = f"single calls into poisoned memory, read {told['looks']} time(s) until the result was there"
        if not told["right"]:
            evidence = {"part": PART, "of": lane, "size": size}
            stage.codes.append(Code(code="read_too_early", severity="error", evidence=evidence))
        stage.arrays[f"{lane}/{PART}/{size}/returned_share"] = ratio
    else:
        ratio = sweep.column(lane, size, 1) / sweep.column(lane, size, 0)
        method = "a stream of calls, until the last returned against until all were done"
    interval = statistics.median_interval(ratio)
    return float(np.median(ratio)) if len(ratio) else None, list(interval) if interval else None, method


def launch_bound_below(
    sizes: list[int], done_s: list[float | None], device_s: list[float | None] | None
) -> tuple[float | None, str]:
    """The size under which an operation costs more than its work, between two measured sizes in the logarithm.

    The cost is that of the smallest operation, 1 x 1; on a device with a clock of its own it is what completion takes
    beyond the device's time. None where even the largest costs more than its work.
    """
    if device_s is None:
        method = "where completion is twice that of a 1 x 1 operation"
        costs = [2 * done_s[0] / d if done_s[0] and d else None for d in done_s]
    else:
        method = "where half of the time between completions is the device's own"
        costs = [d / (2 * own) if d and own else None for d, own in zip(done_s, device_s, strict=True)]
    known = [(size, cost) for size, cost in zip(sizes, costs, strict=True) if cost]
    last = max((i for i, (_, cost) in enumerate(known) if cost > 1), default=None)
    if last is None:
        return float(sizes[0]), method
    if last + 1 >= len(known):
        return None, method
    (low, over), (high, under) = known[last], known[last + 1]
    share = math.log(over) / (math.log(over) - math.log(under))
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low))), method


def _tell_queue(stage: Stage, contest: Contest) -> None:
    """How far the front end may run ahead, on every device."""
    if not stage.on_cuda:
        reason = "operations on a CPU device are synchronous: a call returns when it is done, so nothing is queued"
        for leased in stage.bench.devices:
            stage.result.figures.append(
                Figure(name="queue_depth", of=leased.name, value=None, unit="operations", reason=reason)
            )
        stage.find(
            PART,
            "operations on a CPU device are synchronous: no queue, nothing to synchronise. Asynchronous is here what a "
            f"program makes so: {THREAD} hands each product to a thread through a queue",
        )
        return
    for leased in stage.bench.devices:
        told = contest.attempt(leased.name, "queue_depth")
        if told is None:
            continue
        depth = told["depth"]
        unblocked = None if depth else f"none of {told['tried']} calls blocked while the device was held"
        stage.result.figures.append(
            Figure(name="queue_depth", of=leased.name, value=depth, unit="operations", reason=unblocked)
        )
        ahead = f"the front end may be {depth} operations ahead before a call blocks"
        stage.find(PART, f"{leased.name}: {unblocked or ahead}")
