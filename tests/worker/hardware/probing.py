"""Probes run as a job's own process runs them: in a fresh process, which tells too what it left behind."""

from __future__ import annotations

import os
from pathlib import Path

from tests.worker.fresh import call_fresh
from worker import processes
from worker.bench import LeasedDevice
from worker.hardware.probe import ProbeBench, ProbeReport
from worker.hardware.table import probe


def bench_in(folder: Path, budget_s: float = 0.5, devices: int = 2, service_url: str | None = None) -> ProbeBench:
    """A bench on this process's cores, shared out over so many CPU devices."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    leased = tuple(LeasedDevice(f"cpu:{i}", "cpu", cores[i::devices] or cores) for i in range(devices))
    return ProbeBench(cores, leased, folder, 2 << 30, budget_s, service_url, progress=_quietly)


def _quietly(message: str) -> None:
    """Nobody watches. (A lambda would not go to another process.)"""


def run_probe(name: str, bench: ProbeBench) -> ProbeReport:
    """Its report; nothing may be left of it: no file, no process."""
    report, left = call_fresh(_run, name, bench)
    assert left == [], "processes of the probe are still there"
    assert list(bench.folder.iterdir()) == []
    assert isinstance(report, ProbeReport)
    return report


def _run(name: str, bench: ProbeBench) -> tuple[ProbeReport, list[int]]:
    processes.become_subreaper()
    return probe(name)(bench), processes.descendants(os.getpid())


def recompute(report: ProbeReport) -> None:
    """Every figure follows from what stands beside it."""
    for reading in report.readings:
        assert reading.value is not None and reading.value > 0, reading
        assert reading.seconds and reading.method and reading.repeats, reading
        if reading.unit == "s":
            assert reading.count and abs(reading.value * reading.count / reading.seconds - 1) < 1e-9, reading
        else:
            work = reading.bytes if reading.unit == "B/s" else reading.count
            assert work and abs(reading.value * reading.seconds / work - 1) < 1e-9, reading
