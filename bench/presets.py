"""Every preset in every variant that this machine can run: is each right, and which is fastest.

    python bench/presets.py [--budget 3] [--presets mlp lenet]

One job a preset, in a process of its own as a worker would run it. A variant that is skipped or fails where the machine
has what it needs, or whose output is not eager's, makes the exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

from torchstone.models import Preset
from torchstone.results import Result
from torchstone.specs import Variant, parse_spec
from worker.bench import Bench, LeasedDevice
from worker.workloads import workload

CORES = tuple(sorted(os.sched_getaffinity(0)))


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=3.0)
    parser.add_argument("--presets", nargs="+", default=list(get_args(Preset)))
    arguments = parser.parse_args()
    faults = 0
    for preset in arguments.presets:
        fields = {
            "kind": "jit",
            "model": {"preset": preset},
            "variants": [variant.value for variant in Variant],
            "budget_s": arguments.budget,
        }
        begun_s = time.perf_counter()
        result = fresh(fields)
        print(f"\n{preset}: {time.perf_counter() - begun_s:.0f} s, {result.quality.grade}")
        for row in result.comparisons:
            speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
            print(f"  {row.of:26} {speedup:>7}  {row.verdict}  {row.reason or ''}")
            faults += row.verdict == "withheld"
        for skipped in result.skipped:
            print(f"  {skipped.of:26} {skipped.status}: {skipped.reason}")
            faults += skipped.of != Variant.cuda_graph.value
        sys.stdout.flush()
    return 1 if faults else 0


def fresh(fields: dict[str, Any]) -> Result:
    """The job's result, from a process forked before any tensor operation."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["worker.preload_compiler"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, fields))
    process.start()
    theirs.close()
    text = ours.recv()
    process.join()
    return Result.model_validate_json(text)


def _answer(pipe: Connection, fields: dict[str, Any]) -> None:
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        with tempfile.TemporaryDirectory() as folder:
            leased = [LeasedDevice("cpu:0", "cpu", CORES)]
            result: Result = workload("jit")(parse_spec(fields), Bench("bench", 1, "localhost", leased, Path(folder)))
        pipe.send(result.to_json())


if __name__ == "__main__":
    sys.exit(main())
