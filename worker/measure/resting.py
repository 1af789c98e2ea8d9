"""A stopwatch whose process is at rest between turns: its helper threads sleep before another's clock starts.

    class Product(Resting): ...            # as a Stopwatch; every answer waits until no helper thread runs

Threads of OpenMP and of BLAS libraries do not sleep when a parallel operation ends: they spin, since the next one may
come at once (seen: libgomp 16 to 30 ms, OpenBLAS 100 ms). Meanwhile they take a core from whoever has the next turn,
and a product of two threads may then take forty times as long. Processes of one thread have nothing to wait for.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

from worker.measure.stopwatch import Stopwatch

_LONGEST_S = 0.2
_LOOK_S = 0.25e-3


class Resting(Stopwatch):
    """A stopwatch that waits for its process's helper threads after whatever it is asked to time."""

    def first_call(self, key: str) -> float:
        took_s = super().first_call(key)
        self.rest()
        return took_s

    def warm_up(self, key: str, limit_s: float) -> dict[str, object]:
        told = super().warm_up(key, limit_s)
        self.rest()
        return told

    def turn(self, key: str, calls: int, settle_s: float, call_s: float) -> list[float]:
        took = super().turn(key, calls, settle_s, call_s)
        self.rest()
        return took

    def rest(self) -> float:
        """Wait until no other thread of this process runs, for a fifth of a second at most; seconds that it took."""
        start_s = time.perf_counter()
        while helpers_run() and time.perf_counter() - start_s < _LONGEST_S:
            time.sleep(_LOOK_S)
        return time.perf_counter() - start_s


def helpers_run() -> bool:
    """Whether a thread of this process other than the caller's is running, or could."""
    own = threading.get_native_id()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            state = (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state == "R" and int(task.name) != own:
                return True
    return False
