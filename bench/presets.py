"""Every preset in every variant that this machine can run: is each right, and which is fastest.

    python bench/presets.py [--budget 3] [--presets mlp lenet]

One job a preset, in a process of its own as a worker would run it. A variant that is skipped or fails where the machine
has what it needs, or whose output is not eager's, makes the exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.worker.fresh import call_fresh
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
        result = Result.model_validate_json(call_fresh(measured, fields))
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


def measured(fields: dict[str, Any]) -> str:
    """The job's result, as JSON; silently."""
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        with tempfile.TemporaryDirectory() as folder:
            leased = [LeasedDevice("cpu:0", "cpu", CORES)]
            result: Result = workload("jit")(parse_spec(fields), Bench("bench", 1, "localhost", leased, Path(folder)))
        return result.to_json()


if __name__ == "__main__":
    sys.exit(main())
