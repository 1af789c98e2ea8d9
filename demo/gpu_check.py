"""Every kind of experiment on this machine's GPUs, then the tests that need one: what `make gpu-check` runs.

The specs are those of demo/gpu/KIND.json, a list for each kind; a device count of "all" becomes the number of GPUs.
They run on a Torchstone of their own, in a scratch folder. Exit codes: 0 all succeeded, 1 something failed, 3 there is
no GPU here, so nothing was checked. It ends within 8 minutes, whatever hangs. No GPU has run it yet.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from torchstone.client import Client
from torchstone.specs import KINDS
from worker.devices import _cuda_devices

WITHIN_S = 480
NO_GPU = 3
SPECS = Path(__file__).with_name("gpu")


def specs(gpus: int) -> list[dict[str, Any]]:
    """Of every kind, for so many GPUs. Raises FileNotFoundError where a kind has none."""
    found = []
    for kind in KINDS:
        for spec in json.loads((SPECS / f"{kind}.json").read_text()):
            if spec["devices"]["count"] == "all":
                spec["devices"]["count"] = gpus
            found.append(spec)
    return found


def run_jobs(url: str, gpus: int, deadline_s: float) -> bool:
    """Whether every spec's job succeeded."""
    well = True
    with Client(url) as client:
        for spec in specs(gpus):
            begun_s = time.monotonic()
            job = client.submit(spec)
            job = client.wait(job["id"], timeout_s=max(1.0, deadline_s - begun_s))
            took_s = time.monotonic() - begun_s
            print(f"{spec['kind']} {json.dumps(spec.get('model', {}))}: {job['state']}, {took_s:.0f} s", flush=True)
            if job["state"] != "succeeded":
                well = False
                print(json.dumps(job["error"]), *client.logs(job["id"]), sep="\n")
                continue
            for row in job["result"]["skipped"]:
                print(f"  {row['of']} {row['status']}: {row['reason']}")
            failed = [row for row in job["result"]["checks"] if not row["passed"]]
            for row in failed:
                print(f"  not equal: {row['name']} of {row['of']} at {row['at']}: {row['norm_rel_error']}")
            well = well and not failed
    return well


def main() -> int:
    """See the module."""
    gpus = len(_cuda_devices([0]))
    if gpus == 0:
        print("gpu-check: NVML finds no CUDA device on this machine, so nothing was checked", file=sys.stderr)
        return NO_GPU
    deadline_s = time.monotonic() + WITHIN_S
    binary = Path(sys.executable).with_name("torchstone")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHSTONE_")}
    with tempfile.TemporaryDirectory() as folder:
        up = subprocess.Popen(
            [binary, "up", "--port", "0", "--data", f"{folder}/data"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        end = threading.Timer(WITHIN_S, up.terminate)
        end.start()
        try:
            assert up.stdout is not None
            lines = (re.search(r"ready in .* s: (http\S*)", line) for line in up.stdout)
            ready = next((match for match in lines if match), None)
            if ready is None:
                print("gpu-check: torchstone up ended before it was ready", file=sys.stderr)
                return 1
            well = run_jobs(ready[1], gpus, deadline_s)
        finally:
            end.cancel()
            up.terminate()
            up.wait(timeout=60)
    left_s = max(30.0, deadline_s - time.monotonic())
    tests = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu"], timeout=left_s, check=False)
    return 0 if well and tests.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
