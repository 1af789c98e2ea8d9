"""How long the service takes to start: from its process to the first answer, against importing its libraries alone.

    python bench/service_start.py [--pairs 9]

Alternates: start `python -m service` on an embedded broker and database and ask /healthz until it answers; and import
fastapi, uvicorn and SQLAlchemy in a fresh Python, of which the service is made. Printed, with medians and ranges: both
in seconds (goal: under 1 s), and their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from torchstone import broker
from torchstone.settings import Settings
from torchstone.store import migrate

_LIBRARIES = "import os, fastapi, uvicorn, sqlalchemy; os._exit(0)"  # without the time that its end takes


def first_answer_s(settings: Settings) -> float:
    """Seconds from the start of the service's process to its first answer."""
    command = [sys.executable, "-P", "-m", "service"]
    begun_s = time.perf_counter()
    process = subprocess.Popen(
        command, env={**os.environ, **settings.environment()}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{settings.public_url}/healthz", timeout=10).read()
                return time.perf_counter() - begun_s
            time.sleep(0.002)
        raise RuntimeError(f"the service ended with {process.returncode}")
    finally:
        process.terminate()
        process.wait(30)


def imported_s() -> float:
    """Seconds of a Python that imports the libraries."""
    begun_s = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-c", _LIBRARIES], check=True)
    return time.perf_counter() - begun_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory(prefix="torchstone-bench-") as folder:
        settings = Settings(data=Path(folder), port=_free_port())
        migrate(settings.database_url)
        served = subprocess.Popen(broker.prepare(settings), stdout=subprocess.DEVNULL)
        try:
            first_answer_s(settings)
            both = [(first_answer_s(settings), imported_s()) for _ in range(pairs)]
        finally:
            served.terminate()
            served.wait(30)
    for what, values, unit in (
        ("service, start to first answer", [ours for ours, _ in both], "s"),
        ("its libraries, imported alone", [theirs for _, theirs in both], "s"),
        ("service / libraries", [ours / theirs for ours, theirs in both], "x"),
    ):
        print(_line(what, values, unit))


def _line(what: str, values: Sequence[float], unit: str) -> str:
    median = statistics.median(values)
    return f"{what:34} median {median:6.3f} {unit}  ({min(values):.3f} .. {max(values):.3f})"


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


if __name__ == "__main__":
    main()
