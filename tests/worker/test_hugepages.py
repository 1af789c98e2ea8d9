"""What a process holds is gathered into huge pages; that changes nothing but the price of a fork."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.worker.fresh import call_fresh
from worker import hugepages


def _collapse_some() -> tuple[int, int, bool]:
    """Bytes in huge pages before and after; whether what was there still is."""
    held = [bytes([number % 256]) * (1 << 20) for number in range(16)]
    before = _huge_bytes()
    after = hugepages.collapse()
    return before, after, all(piece == bytes([number % 256]) * (1 << 20) for number, piece in enumerate(held))


def _huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux gathers memory on request")
def test_memory_is_gathered_and_stays_what_it_was() -> None:
    before, after, intact = call_fresh(_collapse_some)
    assert intact
    assert after > before or before == 0, (
        "the process that it was forked from has gathered its own, where the kernel can"
    )
