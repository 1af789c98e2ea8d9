"""Is the stopwatch right? Beside torch.utils.benchmark on the same call, its own cost per call, and A/A runs.

    python bench/stopwatch.py                 # prints ratios; every pair is taken in turn within one run

- agreement: median of `jit`'s eager MLP against Timer.blocked_autorange on the same call, core and thread count. The
  two take turns, in alternating order, in windows as short as a shared machine asks for: its speed changes by the
  second. The median of the pairs' ratios, with its order-statistic interval. Goal: within 3 %.
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
from torchstone.specs import JitSpec, parse_spec
from worker.bench import Bench, LeasedDevice
from worker.measure.statistics import median_interval
from worker.measure.stopwatch import Stopwatch
from worker.workloads import workload

THREADS = 1
CORES = tuple(sorted(os.sched_getaffinity(0)))
"""The first is measured on."""
SPEC = {"kind": "jit", "model": {"preset": "mlp"}, "threads": THREADS}


def main() -> None:
    """Run all three and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--window", type=float, default=0.3, help="seconds of measuring, for agreement")
    parser.add_argument("--again", type=int, default=20)
    parser.add_argument("--budget", type=float, default=2.0)
    arguments = parser.parse_args()
    print(f"overhead: {overhead_share():.3%} of a 50 us call (goal: under 1 %)")
    agreement(arguments.pairs, arguments.window)
    again(arguments.again, arguments.budget)


def agreement(pairs: int, budget_s: float) -> None:
    """Our median against torch.utils.benchmark's, pair by pair."""
    ratios = list[float]()
    for index in range(max(pairs, 7)):
        took = dict[Callable[[float], float], float]()
        for measure in (our_median_s, their_median_s)[:: 1 if index % 2 else -1]:
            took[measure] = fresh(partial(measure, budget_s))
        ratios.append(took[our_median_s] / took[their_median_s])
    low, high = median_interval(np.array(ratios)) or (math.nan, math.nan)
    middle = statistics.median(ratios)
    print(f"agreement: ours / blocked_autorange = {middle:.4f} [{low:.4f}, {high:.4f}] over {len(ratios)} pairs")
    print("           (goal: within 3 %)")


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


def our_median_s(budget_s: float) -> float:
    """Eager's steady latency, as a job tells it."""
    result = run_job({"variants": ["eager"], "budget_s": budget_s, "ci_half_width": 1e-6})
    (timing,) = [t for t in result.timings if t.name == "latency"]
    return timing.median or math.nan


def their_median_s(budget_s: float) -> float:
    """The same call under torch.utils.benchmark."""
    import torch
    from torch.utils.benchmark import Timer

    from worker import models

    os.sched_setaffinity(0, CORES[:1])
    spec = parse_spec(SPEC)
    assert isinstance(spec, JitSpec)
    model = models.build(spec.model, spec.seed).eval().requires_grad_(False)
    (x,) = models.inputs(spec.model, 1, spec.seed)
    with torch.inference_mode():
        timer = Timer("model(x)", globals={"model": model, "x": x}, num_threads=THREADS)
        return float(timer.blocked_autorange(min_run_time=budget_s).median)


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
