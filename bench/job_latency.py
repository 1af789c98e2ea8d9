"""What a job costs beyond its measuring, and against a plain script: both in one run, in pairs.

    python bench/job_latency.py [--pairs 9]

Starts Torchstone in a scratch folder, warms it with one job, then alternates: POST a `jit` job on the MLP whose
measuring takes 1 s, and run that job's own `reproduce.py` (plain torch, the same measurement) in a fresh Python.
Printed, with medians and the range over pairs: seconds from POST to `succeeded` over the seconds of measuring (goal: at
most 0.5), and the ratio of the two wall times (goal: under 1).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.running import running
from torchstone.client import Client

MEASURING_S = 1.0
SPEC = {"kind": "jit", "model": {"preset": "mlp"}, "budget_s": MEASURING_S, "ci_half_width": 1e-6}


def job_s(client: Client) -> tuple[float, str]:
    """Seconds from POST to `succeeded` as a client sees it, and the job's id."""
    begun_s = time.perf_counter()
    job = client.submit(SPEC, wait_s=60)
    took_s = time.perf_counter() - begun_s
    assert job["state"] == "succeeded", job["error"]
    return took_s, job["id"]


def script_s(script: Path) -> float:
    """Seconds of `python reproduce.py`, from start to end."""
    begun_s = time.perf_counter()
    subprocess.run([sys.executable, str(script)], check=True, stdout=subprocess.DEVNULL, cwd=script.parent)
    return time.perf_counter() - begun_s


def line(name: str, values: list[float], unit: str) -> str:
    return f"{name:34} median {statistics.median(values):6.3f} {unit}  ({min(values):.3f} .. {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as scratch, running(Path(scratch) / "data") as up, Client(up.url) as client:
        cold_s, job_id = job_s(client)
        script = client.download(job_id, "reproduce.py", Path(scratch) / "reproduce.py")
        script_s(script)
        jobs, scripts = [], []
        for _ in range(pairs):
            jobs.append(job_s(client)[0])
            scripts.append(script_s(script))
    print(f"first job after the start: {cold_s:.2f} s")
    print(line("job, POST to succeeded", jobs, "s"))
    print(line("  beyond 1 s of measuring", [s - MEASURING_S for s in jobs], "s"))
    print(line("python reproduce.py", scripts, "s"))
    print(line("job / script", [a / b for a, b in zip(jobs, scripts, strict=True)], "x"))


if __name__ == "__main__":
    main()
