"""Is the stopwatch right? Beside torch.utils.benchmark on the same call, its own cost per call, and A/A runs.

    python bench/stopwatch.py                 # prints ratios; every pair is taken in turn within one run

- agreement: `jit`'s eager contestant on the MLP against Timer.blocked_autorange on the same call, core and thread
  count, each in a fresh process. The two take turns, in random order, a few milliseconds each: the speed of a shared
  machine changes by the second. A pair of processes gives the ratio of their medians; where a process's memory
  happens to lie makes some percent, so several pairs are made: the median of their ratios, with its order-statistic
  interval. Goal: within 3 %.
- overhead: what the timing loop adds to a call that does nothing, against a call of 50 us. Goal: under 1 %.
- again: pairs of runs of one spec; how many of the speed-ups' ratios have an interval that contains 1. Goal: 17 of 20.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.worker.fresh import call_fresh
from torchstone.results import Result
from torchstone.specs import JitSpec, Variant, parse_spec
from worker import models
from worker.bench import Bench, LeasedDevice
from worker.contestants.runner import Runner
from worker.contestants.table import WAYS
from worker.contestants.ways import setting_of
from worker.measure.contestant import Contestant
from worker.measure.race import Plan, race
from worker.measure.statistics import median_interval
from worker.measure.stopwatch import Stopwatch
from worker.workloads import workload

THREADS = 1
CORES = tuple(sorted(os.sched_getaffinity(0)))
"""The first is measured on."""
THEIR_TURN_S = 5e-3
SPEC = {"kind": "jit", "model": {"preset": "mlp"}, "threads": THREADS}


def main() -> None:
    """Run all three and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of processes, for agreement")
    parser.add_argument("--window", type=float, default=4.0, help="seconds that each pair takes turns")
    parser.add_argument("--again", type=int, default=20)
    parser.add_argument("--budget", type=float, default=2.0)
    arguments = parser.parse_args()
    print(f"overhead: {overhead_share():.3%} of a 50 us call (goal: under 1 %)")
    agreement(arguments.pairs, arguments.window)
    again(arguments.again, arguments.budget)


def agreement(pairs: int, budget_s: float) -> None:
    """Our median against torch.utils.benchmark's, pair by pair."""
    ratios = [fresh(partial(ours_over_theirs, seed, budget_s)) for seed in range(max(pairs, 7))]
    low, high = median_interval(np.array(ratios)) or (math.nan, math.nan)
    middle = statistics.median(ratios)
    print(f"agreement: ours / blocked_autorange = {middle:.4f} [{low:.4f}, {high:.4f}] of {len(ratios)} pairs")
    print("           (goal: within 3 %)")


def ours_over_theirs(seed: int, budget_s: float) -> float:
    """The ratio of the medians of the race's samples, and of blocked_autorange's, taken in turn."""
    with tempfile.TemporaryDirectory() as folder:
        leased = [LeasedDevice("cpu:0", "cpu", CORES[:1])]
        setting = setting_of(jit_spec(), Bench("bench", 1, "localhost", leased, Path(folder)))
        ours = Contestant.start("ours", lambda: Runner(setting, WAYS[Variant.eager], Path(folder)), CORES[:1], THREADS)
        theirs = Contestant.start("theirs", TheirTimer, CORES[:1], THREADS)
        ours.ask("build", name="eager")
        record = race([ours, theirs], "1", Plan("theirs", half_width=1e-6, budget_s=budget_s, seed=seed))
        ours.close(), theirs.close()
    return float(np.median(record.seconds["ours"]) / np.median(record.seconds["theirs"]))


class TheirTimer:
    """torch.utils.benchmark as a contestant: the same call, in blocks of its own choice."""

    def __init__(self) -> None:
        import torch
        from torch.utils.benchmark import Timer

        spec = jit_spec()
        model = models.build(spec.model, spec.seed).eval().requires_grad_(False)
        (x,) = models.inputs(spec.model, 1, spec.seed)
        self.timer = Timer("model(x)", globals={"model": model, "x": x}, num_threads=THREADS)
        self.inference = torch.inference_mode

    def first_call(self, key: str) -> float:
        return self.measured(0.01)

    def warm_up(self, key: str, limit_s: float) -> dict[str, object]:
        return {"samples_s": [], "flat": True, "call_s": self.measured(limit_s)}

    def turn(self, key: str, calls: int, settle_s: float, call_s: float) -> list[float]:
        return [self.measured(THEIR_TURN_S) * calls] * 2

    def measured(self, at_least_s: float) -> float:
        with self.inference():
            return float(self.timer.blocked_autorange(min_run_time=at_least_s).median)


def again(pairs: int, budget_s: float) -> None:
    """Two runs of one spec: the ratio of their speed-ups, whose interval follows from both."""
    contain = 0
    for _ in range(pairs):
        one, two = (fresh(partial(our_speedup, budget_s)) for _ in range(2))
        ratio = one[0] / two[0]
        half = math.hypot(*(math.log(high / low) / 2 for _, low, high in (one, two)))
        contain += abs(math.log(ratio)) <= half
    print(f"again: {contain} of {pairs} pairs of runs have a ratio whose interval contains 1 (goal: 17 of 20)")


def overhead_share() -> float:
    """Seconds per call of a function that does nothing, as the stopwatch sees it, relative to 50 us: an upper bound."""
    watch = Stopwatch()
    watch.calls["empty"] = partial(int)
    # In blocks of 40, as a call of 50 us has, so that the clock's own cost counts too.
    blocks = [watch.turn("empty", calls=40, settle_s=0.0, call_s=1e-7)[0] for _ in range(1000)]
    return statistics.median(blocks) / 40 / 50e-6


def run_job(fields: dict[str, Any]) -> Result:
    """The experiment, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        spec = parse_spec(SPEC | fields)
        leased = [LeasedDevice("cpu:0", "cpu", CORES[:1])]
        bench = Bench("bench", 1, "localhost", leased, Path(folder), spare_cores=CORES[1:])
        result: Result = workload("jit")(spec, bench)
        return result


def jit_spec() -> JitSpec:
    """The spec as the worker gets it."""
    spec = parse_spec(SPEC)
    assert isinstance(spec, JitSpec)
    return spec


def our_speedup(budget_s: float) -> tuple[float, float, float]:
    """script against eager: the ratio and its interval."""
    result = run_job({"variants": ["eager", "script"], "budget_s": budget_s, "ci_half_width": 1e-6})
    (row,) = [c for c in result.comparisons if c.of == "script"]
    assert row.speedup and row.ci95
    return row.speedup, *row.ci95


def fresh(call: Callable[[], Any]) -> Any:
    """`call()` in a process that never ran a tensor operation, silently."""
    return call_fresh(_silently, call)


def _silently(call: Callable[[], Any]) -> Any:
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        return call()


if __name__ == "__main__":
    main()
