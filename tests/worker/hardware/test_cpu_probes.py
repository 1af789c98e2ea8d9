"""The probes of memory, caches, vectors and GEMM: figures recompute, content is checked, absent parts are named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.worker.fresh import call_fresh
from torchstone.results import Figure, Result
from torchstone.specs import parse_spec
from worker.bench import Bench, LeasedDevice
from worker.hardware import table
from worker.hardware.cache import ladder_sizes, level_sizes
from worker.hardware.latencies import EVENTS, NAME, latency_table
from worker.hardware.places import Cache, scopes
from worker.hardware.probe import ProbeBench, ProbeReport, Repeats
from worker.hardware.table import probe
from worker.hardware.vector import cpu_flags
from worker.workloads import workload

CPU_PROBES = (pytest.param("memory", marks=pytest.mark.slow), "cache", "vector", "gemm")
MEMORY_BYTES = 96 << 20  # arrays of 10 MiB: a figure of the cache, and said so


def bench(folder: Path, **fields: object) -> ProbeBench:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    devices = tuple(LeasedDevice(f"cpu:{i}", "cpu", (core,)) for i, core in enumerate(cores))
    given = {"cores": cores, "devices": devices, "folder": folder, "memory_bytes": MEMORY_BYTES, "budget_s": 0.3}
    return ProbeBench(**{**given, **fields})  # type: ignore[arg-type]


def report_of(name: str, folder: Path, path: str | None = None) -> ProbeReport:
    if path is not None:
        os.environ["PATH"] = path
    return probe(name)(bench(folder))


@pytest.mark.parametrize("name", CPU_PROBES)
def test_every_figure_recomputes_from_what_stands_beside_it(name: str, tmp_path: Path) -> None:
    report = call_fresh(report_of, name, tmp_path)
    assert report.readings and all(check.passed for check in report.checks) and report.checks
    for reading in report.readings:
        if reading.unit == "1" or reading.value is None:
            continue
        assert reading.seconds and reading.method, reading
        if reading.unit == "s":
            assert reading.value == pytest.approx(reading.seconds / reading.count)
        else:
            work = reading.bytes if reading.unit == "B/s" else reading.flop
            assert reading.value == pytest.approx(work / reading.seconds)
        seconds = report.samples[reading.samples.removeprefix("samples.npz#")]
        best = min(seconds) if reading.statistic == "best" else float(np.median(seconds))
        assert reading.seconds == best
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_torch_measures_what_it_can(tmp_path: Path) -> None:
    report = call_fresh(report_of, "memory", tmp_path, "")
    assert {reading.name for reading in report.readings} == {f"stream_{k}" for k in ("copy", "scale", "add", "triad")}
    assert all("torch" in reading.method and "of that cache" in reading.method for reading in report.readings)
    assert all(check.passed for check in report.checks) and report.checks
    reasons = {row.of: row.reason for row in report.skipped}
    assert "no C compiler" in reasons["memory.latency"] and "no C compiler" in reasons["memory.access"]


def test_groups_of_cores_are_named_once(tmp_path: Path) -> None:
    two = (LeasedDevice("cpu:0", "cpu", (0, 1)), LeasedDevice("cpu:1", "cpu", (2, 3)))
    found = scopes(bench(tmp_path, cores=(0, 1, 2, 3), devices=two))
    assert [(s.cores, s.devices) for s in found] == [((0,), 1), ((0, 1), 1), ((0, 1, 2, 3), 2)]
    # A container's quota of one core's time: the second device's cores are not used.
    one = scopes(bench(tmp_path, cores=(0,), devices=two))
    assert [s.cores for s in one] == [(0,)]


def test_the_ladder_holds_every_size_that_sysfs_tells() -> None:
    found = [
        Cache(1, 48 << 10, "Data", (0,)),
        Cache(2, 1280 << 10, "Unified", (0,)),
        Cache(3, 30 << 20, "Unified", (0,)),
    ]
    levels = level_sizes(found, 128 << 20)
    sizes = ladder_sizes(found, 128 << 20, list(levels.values()))
    assert {cache.bytes for cache in found} <= set(sizes) and max(sizes) == 128 << 20 == levels["memory"]
    below = 0
    for cache in found:
        assert below < levels[f"L{cache.level}"] < cache.bytes
        below = cache.bytes
    assert all(size % 256 == 0 for size in sizes)


def test_flags_are_read_as_the_kernel_tells_them(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: X\nflags\t\t: fpu avx2 fma\n")
    assert cpu_flags(file) == {"fpu", "avx2", "fma"} and cpu_flags(tmp_path / "none") == frozenset()


def test_the_chapters_table_takes_the_figures_that_are_its_own() -> None:
    figures = [
        Figure(name="latency", of="cache", at={"level": "L2"}, value=4e-9, unit="s"),
        Figure(name="sequential_read", of="memory", at={"direction": "forward"}, value=1e10, unit="B/s"),
        Figure(name="launch_completes", of="host_device", value=None, unit="s", reason="broken"),
    ]
    rows = {row[0]: row[2:] for row in latency_table(figures, ["cache", "memory", "host_device"]).rows}
    assert len(rows) == len(EVENTS)
    assert rows["L2 cache reference or hit"] == ["4 ns", "cache latency at level=L2"]
    assert rows["1 MB sequentially from memory"][0] == "100 µs"
    assert rows["GPU kernel launch, and its end"] == ["-", "broken"]
    assert rows["L1 cache reference or hit"] == ["-", "not found on this machine"]
    assert rows["1 MB GPU to GPU"] == ["-", "the probe device_device was not asked for"]


def test_a_rate_keeps_what_it_was_computed_from() -> None:
    report = ProbeReport("x")
    reading = report.rate("copy", Repeats((2.0, 1.0, 4.0)), bytes=8, method="m", at={"cores": 1})
    assert (reading.value, reading.median, reading.seconds, reading.ci95) == (8.0, 4.0, 1.0, None)
    figure = reading.figure().model_dump()
    assert figure["bytes"] == 8 and figure["method"] == "m" and "flop" not in figure
    with pytest.raises(AssertionError, match="two figures"):
        report.rate("copy", Repeats((1.0,)), bytes=8, method="m", at={"cores": 1})


def _with_a_broken_probe(folder: Path) -> tuple[str, list[dict[str, str]], list[str]]:
    """A job of which one probe cannot even be imported."""
    table.MODULES["gemm"] = "worker.hardware.nowhere"
    local = Bench.local(folder)
    said: list[str] = []
    local.send = lambda event: said.append(event["progress"]["message"])
    spec = parse_spec({"kind": "hardware", "probes": ["gemm", "vector"], "budget_s": 1.0})
    return workload("hardware")(spec, local).to_json(), local.kept, said


def test_a_job_goes_on_where_a_probe_fails(tmp_path: Path) -> None:
    text, kept, said = call_fresh(_with_a_broken_probe, tmp_path)
    result = Result.model_validate_json(text)
    assert {figure.of for figure in result.figures} == {"vector"}
    [failed] = [row for row in result.skipped if row.status == "failed"]
    assert failed.of == "gemm" and "nowhere" in failed.reason
    assert "probe_failed" in {code.code for code in result.quality.codes}
    assert [row.name for row in result.tables] == [NAME]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reproduce.py", "samples.npz"]
    assert {file["name"] for file in kept} == {"reproduce.py", "samples.npz"}
    with np.load(tmp_path / "samples.npz") as archive:
        rows = [figure.model_extra or {} for figure in result.figures if figure.unit != "1"]
        for told in rows:
            seconds = archive[told["samples"].removeprefix("samples.npz#")]
            assert told["seconds"] == (seconds.min() if told["statistic"] == "best" else np.median(seconds))
    compile((tmp_path / "reproduce.py").read_text(), "reproduce.py", "exec")
    assert said[0] == "gemm"
