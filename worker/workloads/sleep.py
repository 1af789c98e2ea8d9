"""The diagnostic `sleep`: waits, and misbehaves in the way that its spec names; see `torchstone.diagnostics`.

While it runs it holds an abstract socket named after its job. A second process for the same job cannot get that one,
and fails its job: so no test of Torchstone passes where a job ever ran twice at a time on one machine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

from torchstone.diagnostics import Behavior, SleepSpec
from torchstone.errors import WorkloadError
from torchstone.results import Figure, Result
from worker.bench import Bench

_MEGABYTE = 1_000_000
_PIECE_S = 0.5


def run(spec: SleepSpec, bench: Bench) -> Result:
    """Hold the job's socket, do what `spec.behavior` says, wait."""
    with _alone(bench.job_id):
        begun_s = time.monotonic()
        _misbehave(spec, bench)
        while (left_s := begun_s + spec.seconds - time.monotonic()) > 0:
            bench.progress(spec.seconds - left_s, spec.seconds, "s", eta_s=left_s)
            time.sleep(min(left_s, _PIECE_S))
        waited_s = time.monotonic() - begun_s
    return Result(figures=[Figure(name="waited", of="sleep", value=waited_s, unit="s")])


def _alone(job_id: str) -> socket.socket:
    """A socket that exists once a job; it vanishes with the last process that holds it. Linux alone has such names."""
    held = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            held.bind(f"\0torchstone-sleep-{job_id}")
        except OSError:
            held.close()
            raise WorkloadError("another process runs this very job at this moment") from None
    return held


def _misbehave(spec: SleepSpec, bench: Bench) -> None:
    match spec.behavior:
        case Behavior.fork:
            wait = f"import time; time.sleep({spec.seconds + 600})"
            deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            children = [
                subprocess.Popen([sys.executable, "-S", "-c", wait]),
                subprocess.Popen([sys.executable, "-S", "-c", deaf + wait], start_new_session=True),
            ]
            print("started", *(child.pid for child in children), flush=True)
        case Behavior.deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case Behavior.shout:
            line = b"x" * (_MEGABYTE - 1) + b"\n"
            for _ in range(spec.megabytes):
                os.write(1, line)
        case Behavior.leak:
            leaked = []
            while True:
                leaked.append(os.urandom(1) * (16 << 20))
        case Behavior.segfault:
            ctypes.string_at(0)
        case Behavior.exit:
            os._exit(3)
        case Behavior.write:
            path = bench.file("bytes.bin")
            with path.open("wb") as file:
                for number in range(spec.megabytes):
                    # Different for each job and each piece, so that nothing is stored already.
                    seed = f"{bench.job_id} {number} ".encode()
                    file.write((seed * (_MEGABYTE // len(seed) + 1))[:_MEGABYTE])
            bench.keep(path, "application/octet-stream")
