"""Collectives between CPU devices: exact results, and rates by the formulas of nccl-tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.worker.fresh import call_fresh
from tests.worker.hardware.probing import bench_in, recompute, run_probe
from worker.hardware.collectives import BUS_FACTORS, SIZES_BYTES, Rank, _part_s
from worker.hardware.pair import ask_all, closing
from worker.hardware.probe import ProbeBench
from worker.measure.contestant import Contestant, ContestantFailed


def test_formulas() -> None:
    """nccl-tests, doc/PERFORMANCE.md: 8 ranks carry 14/8 of an all-reduce, 7/8 of the others."""
    assert {name: factor(8) for name, factor in BUS_FACTORS.items()} == {
        "all_reduce": 1.75,
        "reduce_scatter": 0.875,
        "all_gather": 0.875,
    }


def test_what_comes_late_gets_less_time_and_never_none() -> None:
    """18 parts of 1 s each, of which the starts and the checks take their time first."""
    assert _part_s(left_s=18.0, parts_left=18, even_s=1.0) == 1.0
    assert _part_s(left_s=13.5, parts_left=18, even_s=1.0) == 0.75
    assert _part_s(left_s=-5.0, parts_left=2, even_s=1.0) == 0.5


def test_all_operations_and_sizes(tmp_path: Path) -> None:
    report = run_probe("collectives", bench_in(tmp_path, budget_s=0.9))
    recompute(report)
    (check,) = report.checks
    assert check.passed and report.facts["backend"] == "gloo"
    rates = {(reading.name, reading.at["message_bytes"]): reading for reading in report.readings}
    for operation, factor in BUS_FACTORS.items():
        for size in SIZES_BYTES[:3]:
            algbw, busbw = rates[f"{operation}_algbw", size], rates[f"{operation}_busbw", size]
            assert algbw.value and busbw.value and algbw.count
            assert busbw.value / algbw.value == pytest.approx(factor(2))
            assert algbw.bytes == algbw.count * size
    assert {curve.name for curve in report.curves} == {f"{o}_{r}" for o in BUS_FACTORS for r in ("algbw", "busbw")}
    for skip in report.skipped:
        assert "would take this probe over its time" in skip.reason


def test_three_ranks_share_what_three_can_share(tmp_path: Path) -> None:
    report = run_probe("collectives", bench_in(tmp_path, budget_s=0.2, devices=3))
    assert report.checks[0].passed
    assert {reading.at["message_bytes"] % 12 for reading in report.readings} == {0}


def test_one_device_has_nobody_to_talk_to(tmp_path: Path) -> None:
    report = run_probe("collectives", bench_in(tmp_path, devices=1))
    (skip,) = report.skipped
    assert "two devices or more" in skip.reason and report.readings == []


class Deaf(Rank):
    """A rank whose sums are its own."""

    @staticmethod
    def _run(operation: str, sent: object, received: object) -> None:
        """It lets the others do the work."""


class Mortal(Rank):
    """A rank that is killed in the middle."""

    def check(self, operation: str, total_bytes: int) -> int:
        os.kill(os.getpid(), signal.SIGSEGV)
        return 0


def _with_one(bench: ProbeBench, kind: type[Rank]) -> list[int]:
    """Wrong elements by rank, where rank 1 is of that kind."""
    meeting = bench.folder / "meeting"
    gang = [
        Contestant.start(f"rank:{rank}", lambda rank=rank: (kind if rank else Rank)(rank, 2, "gloo", meeting), (0,), 1)
        for rank in range(2)
    ]
    with closing(gang):
        ask_all([(one, ("join", {})) for one in gang])
        asked = gang if kind is Mortal else gang[1:]
        return ask_all([(one, ("check", {"operation": "all_reduce", "total_bytes": 1024})) for one in asked])


def test_a_wrong_sum_is_found(tmp_path: Path) -> None:
    assert call_fresh(_with_one, bench_in(tmp_path), Deaf) == [256]


def test_a_rank_that_dies_ends_the_probe(tmp_path: Path) -> None:
    with pytest.raises(ContestantFailed):
        call_fresh(_with_one, bench_in(tmp_path), Mortal)
