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
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchstone.asynchrony import Part
from torchstone.results import Check, Code, Curve, Figure, Timing
from worker.asynchrony import feeding
from worker.asynchrony.chain import Chain
from worker.asynchrony.contest import Contest
from worker.asynchrony.stage import Stage, duration, synchronizer
from worker.measure import cuda, statistics
from worker.measure.environment import Load
from worker.measure.quality import load_codes
from worker.measure.statistics import FEWEST_ROUNDS, FIRST_LOOK
from worker.measure.stopwatch import Stopwatch

PART = Part.dispatch.value
THREAD = "worker_thread"
_SMALLEST = (1, 4, 16)
_BLOCK_S = 2e-3
_MOST_IN_BLOCK = 256
"""Fewer than any device queues: a block that filled the queue would time how fast it empties."""
_MOST_ROUNDS = 240
_TRIALS = 25
_ARRIVAL_S = 0.4
_FEEDING_SHARE = 0.35

_cuda: Any = torch.cuda


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
        contest.start_on(
            leased.name, lambda device=device: Stream(sizes, stage.dtype, device, spec.seed), leased.cores, threads
        )
    if not stage.on_cuda:
        first = stage.bench.devices[0]
        threads = spec.threads or len(first.cores)
        contest.start_on(
            THREAD, lambda: ThroughThread(sizes, stage.dtype, stage.device, spec.seed, threads), first.cores, threads
        )


# -- below the pipe ---------------------------------------------------------------------------------------------


class Stream(Stopwatch):
    """A chain of products for every size on one device; `turn` times a block of them (key: the size)."""

    def __init__(self, sizes: list[int], dtype: torch.dtype, device: torch.device, seed: int) -> None:
        super().__init__(synchronizer(device), torch.inference_mode)
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.chains = {str(size): Chain(size, dtype, device, seed + size) for size in sizes}
        self.calls = {key: chain.step for key, chain in self.chains.items()}

    def turn(self, key: str, calls: int, settle_s: float, call_s: float) -> list[float]:
        """[seconds until done, seconds until the last call returned]; on CUDA also by the device's own clock."""
        took = super().turn(key, calls, settle_s, call_s)
        if self.device.type == "cuda":
            with self.mode():
                took.append(cuda.device_seconds(self.calls[key], calls, took[1]))
        return took

    def check(self, key: str) -> dict[str, Any]:
        """Whether the whole stream's result is exactly right; fields of a Check row."""
        self.synchronize()
        return {**self.chains[key].check(), "detail": f"after {self.chains[key].steps} products"}

    def arrival(self, key: str, trials: int) -> dict[str, Any]:
        """Single products on a CPU device: seconds until the call returned, and until its result was seen.

        The output is filled with NaN before; `looks` is how often it was read until both its ends were there.
        """
        chain = self.chains[key]
        returned_s, arrived_s, looks, right = [], [], [], True
        with self.mode():
            for _ in range(trials):
                chain.y.fill_(math.nan)
                ends = chain.y.view(-1)[:: max(1, chain.y.numel() - 1)].numpy()
                seen = 0
                start_s = time.perf_counter()
                chain.step()
                back_s = time.perf_counter()
                while True:
                    seen += 1
                    if not np.isnan(ends).any():
                        break
                there_s = time.perf_counter()
                np.isnan(ends).any()  # the same look again: what looking takes is no part of the arrival
                look_s = time.perf_counter() - there_s
                returned_s.append(back_s - start_s)
                arrived_s.append(max(back_s, there_s - look_s) - start_s)
                looks.append(seen)
                right = right and bool(chain.check()["passed"])
        return {"returned_s": returned_s, "arrived_s": arrived_s, "looks": max(looks), "right": right}

    def queue_depth(self, most: int = 1 << 15, hold_s: float = 0.4) -> dict[str, Any]:
        """Operations that were queued before a call blocked, while the device was kept from starting any of them.

        `depth` is None where none of `most` blocked.
        """
        x = torch.zeros(1, device=self.device)
        cycles = int(hold_s * 1e3 * float(_cuda.get_device_properties(self.device).clock_rate))
        with self.mode():
            x.add_(1)
            self.synchronize()
            _cuda._sleep(cycles)
            start_s, depth = time.perf_counter(), None
            for queued in range(most):
                before_s = time.perf_counter()
                x.add_(1)
                now_s = time.perf_counter()
                if now_s - before_s > hold_s / 4:
                    depth = queued
                    break
                if now_s - start_s > hold_s / 2:
                    most = queued + 1
                    break
            self.synchronize()
        return {"depth": depth, "tried": most, "hold_s": hold_s}


class ThroughThread(Stream):
    """The same stream, but a worker thread does it: the front end only puts operations into a queue."""

    def __init__(self, sizes: list[int], dtype: torch.dtype, device: torch.device, seed: int, threads: int) -> None:
        super().__init__(sizes, dtype, device, seed)
        self.operations: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.fault: Exception | None = None
        self.calls = {key: self._putter(chain.step) for key, chain in self.chains.items()}
        self.synchronize = self._wait
        threading.Thread(target=self._work, args=(threads,), daemon=True).start()

    def _putter(self, step: Callable[[], object]) -> Callable[[], object]:
        put = self.operations.put
        return lambda: put(step)

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            while True:
                operation = self.operations.get()
                try:
                    operation()
                except Exception as error:  # told to whoever waits for it
                    self.fault = error

    def _wait(self) -> None:
        done = threading.Event()
        self.operations.put(done.set)
        done.wait()
        if self.fault is not None:
            raise self.fault


# -- above the pipe ---------------------------------------------------------------------------------------------


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
        contest, stage = self.contest, self.contest.stage
        stage.say(f"{PART}: streams of products at {len(self.sizes)} sizes for at most {contest.budget_s:.1f} s")
        start_s = time.perf_counter()
        call_s = self._warm_up(0.15 * contest.budget_s)
        draw, before = random.Random(stage.spec.seed), Load.now(contest.cores, contest.pids)
        tell, longest_s = stage.progress_of(PART), 0.0
        while not self._is_enough():
            round_start_s = time.perf_counter()
            if self.rounds and round_start_s + longest_s - start_s > contest.budget_s:
                break
            places = [place for place in call_s if place[0] in contest.names and self._takes_part(place)]
            for lane, key in draw.sample(places, len(places)):
                calls = self.calls[lane, key]
                settle_s = min(0.5e-3, calls * call_s[lane, key])
                took = contest.attempt(lane, "turn", key=key, calls=calls, settle_s=settle_s, call_s=call_s[lane, key])
                if took is not None:
                    self.samples.setdefault((lane, key), []).append([seconds / calls for seconds in took])
            self.rounds += 1
            longest_s = max(longest_s, time.perf_counter() - round_start_s)
            tell(self.rounds, None, max(0.0, contest.budget_s - (time.perf_counter() - start_s)))
        during = Load.now(contest.cores, contest.pids).since(before)
        stage.host["during"][PART] = during
        stage.codes += [*load_codes(during, (None, None)), *self._codes()]
        for (lane, key), rows in self.samples.items():
            for index, what in enumerate(("completion", "dispatch", "device")[: len(rows[0])]):
                stage.arrays[f"{lane}/{PART}/{key}/{what}"] = np.array([row[index] for row in rows])
        print(f"  {self.rounds} rounds in {time.perf_counter() - start_s:.2f} s", flush=True)

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
        evidence = {"part": PART, "rounds": self.rounds, "wanted": FIRST_LOOK}
        severity: Any = "warning" if self.rounds >= FEWEST_ROUNDS else "error"
        return [Code(code="too_few_rounds", severity=severity, evidence=evidence)]


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
    columns = ["completion", "dispatch", "device"]
    for index, what in enumerate(columns):
        for size in sizes:
            samples = sweep.column(lane, size, index)
            if len(samples):
                result.timings.append(
                    Timing(
                        name=what,
                        of=lane,
                        at={"size": size},
                        **statistics.summarise(samples),
                        first_call_s=sweep.first_call_s[lane, str(size)] if what == "completion" else None,
                        calls_per_sample=sweep.calls[lane, str(size)],
                        samples=f"samples.npz#{lane}/{PART}/{size}/{what}",
                    )
                )
        medians = sweep.medians(lane, index)
        if any(m is not None for m in medians):
            xs = [float(size) for size in sizes]
            result.curves.append(
                Curve(name="time_per_operation", of=lane, at={"time": what}, x_name="size", y_name="s", x=xs, y=medians)
            )
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
        shares[size] = share
        row = {"name": "returned_share", "of": lane, "at": {"size": size}, "value": share, "unit": "1"}
        result.figures.append(Figure.model_validate({**row, "ci95": interval, "method": method}))
    bound, method = launch_bound_below(sizes, done, device if device[0] is not None else None)
    reason = None if bound else f"even at {sizes[-1]} an operation costs more than its work"
    row = {"name": "launch_bound_below", "of": lane, "value": bound, "unit": "rows", "reason": reason}
    result.figures.append(Figure.model_validate({**row, "method": method}))
    if done[0] is not None and returned[0] is not None:
        cost = f"the smallest operation takes {duration(done[0])}"
        below = f"under about {bound:.0f} rows it is mostly the cost of a call" if bound else reason
        last = shares.get(sizes[-1])
        where = (
            f"at size {sizes[-1]} a call has returned after {100 * last:.4g} % of the time until its result is there"
        )
        stage.find(PART, f"{lane}: {where}; {cost}, {below}" if last is not None else f"{lane}: {cost}, {below}")


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
        reason = None if told["depth"] else f"none of {told['tried']} calls blocked while the device was held"
        stage.result.figures.append(
            Figure(name="queue_depth", of=leased.name, value=told["depth"], unit="operations", reason=reason)
        )
        ahead = f"{told['depth']} operations ahead before a call blocks" if told["depth"] else str(reason)
        stage.find(PART, f"{leased.name}: the front end may be {ahead}" if told["depth"] else f"{leased.name}: {ahead}")
