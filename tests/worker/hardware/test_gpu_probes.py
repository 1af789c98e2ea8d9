"""GPU probes: skipped with a reason where there is none; on one, exact copies and rates within the link's."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.worker.hardware.probing import bench_in, recompute, run_probe
from worker.bench import LeasedDevice
from worker.devices import _cuda_devices
from worker.hardware.links import links, pcie_bytes_per_s
from worker.hardware.probe import ProbeBench


@pytest.mark.parametrize("probe", ["host_device", "device_device"])
def test_without_a_gpu_they_say_so(tmp_path: Path, probe: str) -> None:
    report = run_probe(probe, bench_in(tmp_path))
    (skip,) = report.skipped
    assert (skip.of, skip.reason) == (probe, "this job holds no CUDA device")
    assert report.readings == []


def test_pcie() -> None:
    """The chapter's 32 GB/s of PCIe 4 x16 are 31.5 after the line code."""
    assert pcie_bytes_per_s(4, 16) == pytest.approx(31.5e9, rel=1e-3)
    assert pcie_bytes_per_s(2, 8) == 4e9
    assert pcie_bytes_per_s(9, 16) is None


def test_an_unknown_gpu_has_no_links() -> None:
    assert links("GPU-00000000-0000-0000-0000-000000000000") == {}


def _gpu_bench(folder: Path) -> ProbeBench:
    cores = sorted(os.sched_getaffinity(0))
    gpus = tuple(LeasedDevice(gpu.name, gpu.type, gpu.cores, gpu.uuid) for gpu in _cuda_devices(cores))
    return replace(bench_in(folder, budget_s=4.0), devices=gpus)


@pytest.mark.gpu
def test_host_and_gpu(tmp_path: Path) -> None:
    bench = _gpu_bench(tmp_path)
    report = run_probe("host_device", bench)
    recompute(report)
    assert report.checks and all(check.passed for check in report.checks)
    for gpu in bench.gpus:
        rates = {(r.name, r.at.get("memory")): r.value for r in report.readings if r.at["device"] == gpu.name}
        assert {("to_device", "pageable"), ("to_host", "pinned"), ("both_ways", "pinned")} <= set(rates)
        assert {("launch_returns", None), ("launch_completes", None)} <= set(rates)
        ceiling = report.facts[gpu.name].get("pcie", {}).get("most_bytes_per_s")
        pinned = rates["to_device", "pinned"]
        assert pinned is not None and (ceiling is None or pinned < 1.05 * ceiling)


@pytest.mark.gpu
def test_gpus_and_their_memory(tmp_path: Path) -> None:
    bench = _gpu_bench(tmp_path)
    report = run_probe("device_device", bench)
    recompute(report)
    assert report.checks and all(check.passed for check in report.checks)
    names = [reading.name for reading in report.readings]
    assert names.count("device_copy") == len(bench.gpus)
    pairs = len(bench.gpus) * (len(bench.gpus) - 1)
    assert names.count("peer_copy") == names.count("peer_latency") == 2 * names.count("peer_both_ways") == pairs
    assert len(report.tables) == bool(pairs)


@pytest.mark.gpu
def test_nccl(tmp_path: Path) -> None:
    bench = _gpu_bench(tmp_path)
    if len(bench.gpus) < 2:
        pytest.skip("NCCL's collectives need two GPUs")
    report = run_probe("collectives", bench)
    recompute(report)
    assert report.checks[0].passed and report.facts["backend"] == "nccl"
