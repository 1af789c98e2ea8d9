"""The probe `cache`: latency and read bandwidth of one core by working-set size, with sysfs's cache sizes marked on it.

Latency: dependent loads over a random cycle (see `worker.hardware.memory`), on huge pages where the kernel gives them,
so that the steps are those of caches and not of the TLB. Bandwidth: words added up, over and over.

In the figures a working set stands for each level: half of the first cache, for the others the geometric mean of the
size and that of the level below (others may hold part of a shared cache), for memory four times the last cache.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from worker.hardware import native
from worker.hardware.memory import array_bytes, chase
from worker.hardware.native import Kernels
from worker.hardware.places import Cache, caches, memory, pinned, random_cycle
from worker.hardware.probe import ProbeBench, ProbeReport, Repeats

SMALLEST_BYTES = 4096
STEPS_PER_OCTAVE = 2
_FALLBACK_FROM_BYTES = 1 << 20
"""From here on torch's own call is a small part of the time."""


def run(bench: ProbeBench) -> ProbeReport:
    """Measure it."""
    report = ProbeReport("cache")
    found = caches(bench.cores[0])
    report.facts["caches"] = [
        {"level": cache.level, "bytes": cache.bytes, "kind": cache.kind, "cores": len(cache.cores)} for cache in found
    ]
    largest, _ = array_bytes(bench, bench.cores[:1], arrays=2)
    levels = level_sizes(found, largest)
    kernels = native.load(scratch=bench.folder)
    with pinned(bench.cores[:1]):
        if isinstance(kernels, Kernels):
            _ladder(bench, report, kernels, ladder_sizes(found, largest, list(levels.values())), levels, found)
        else:
            report.facts["kernels"] = kernels.reason
            report.skip("latency", kernels.reason)
            _ladder_by_torch(bench, report, [size for size in ladder_sizes(found, largest, []) if size], levels)
    if not found:
        report.skip("sizes", "this system does not tell its cache sizes")
    return report


def level_sizes(found: list[Cache], largest: int) -> dict[str, int]:
    """The working set in bytes that stands for each level: see the module; `largest` is that for memory."""
    sizes, below = {}, 0
    for cache in found:
        sizes[f"L{cache.level}"] = _lines(math.isqrt(below * cache.bytes) if below else cache.bytes // 2)
        below = cache.bytes
    return {**sizes, "memory": largest}


def ladder_sizes(found: list[Cache], largest: int, more: list[int]) -> list[int]:
    """Working sets from 4 KiB to `largest` in half octaves, with what sysfs says of each cache, and `more`."""
    steps = int(np.log2(largest / SMALLEST_BYTES) * STEPS_PER_OCTAVE)
    ladder = [_lines(int(SMALLEST_BYTES * 2 ** (step / STEPS_PER_OCTAVE))) for step in range(steps + 1)]
    sizes = {*ladder, *(cache.bytes for cache in found), *more, largest}
    return sorted(size for size in sizes if size <= largest)


def _lines(size: int) -> int:
    return max(SMALLEST_BYTES // 2, size // 256 * 256)


def _ladder(
    bench: ProbeBench,
    report: ProbeReport,
    kernels: Kernels,
    sizes: list[int],
    levels: dict[str, int],
    found: list[Cache],
) -> None:
    latency_s, rate, proven = dict[int, float](), dict[int, float](), []
    names: dict[int, list[str]] = {}
    for level, size in levels.items():
        names.setdefault(size, []).append(level)
    for number, size in enumerate(sizes):
        bench.progress(f"working set {number + 1} of {len(sizes)}")
        budget_s = bench.budget_s / len(sizes) * (2 if size in names else 0.7)
        cycle = random_cycle(size, bench.seed, huge_pages=True)
        took, steps, closed = chase(kernels, cycle, 0.5 * budget_s)
        read, right = _read(kernels, size, 0.3 * budget_s)
        latency_s[size], rate[size] = took.median / steps, size / read.median
        proven += [closed, right]
        for level in names.get(size, []):
            at = {"level": level}
            method = f"pointer chase over a random cycle, huge pages asked for, {kernels.method}"
            report.latency("latency", took, count=steps, method=method, at=at, working_set_bytes=size)
            method = f"64-bit words added up, {kernels.method}"
            report.rate("read", read, bytes=size, method=method, at=at, working_set_bytes=size)
    x = [float(size) for size in sizes]
    report.curve("latency", "working_set_bytes", x, "s", [latency_s[size] for size in sizes])
    report.curve("read", "working_set_bytes", x, "bytes_per_s", [rate[size] for size in sizes])
    marks = [cache.bytes for cache in found if cache.bytes in latency_s]
    if marks:
        at = {"marks": "sysfs"}
        report.curve("latency", "working_set_bytes", list(map(float, marks)), "s", [latency_s[m] for m in marks], at)
        rates = [rate[mark] for mark in marks]
        report.curve("read", "working_set_bytes", list(map(float, marks)), "bytes_per_s", rates, at)
    report.check("ladder_content", all(proven), "closed cycles and known sums", bitwise=all(proven))


def _read(kernels: Kernels, size: int, budget_s: float) -> tuple[Repeats, bool]:
    """Seconds of reading `size` bytes once, and whether their sum was right each time."""
    words: NDArray[np.uint64] = memory(size // 8, np.uint64, huge_pages=True)
    words[:] = np.arange(words.size, dtype=np.uint64)
    once_s, total = kernels.read_all(words, 1)
    once_s, _ = kernels.read_all(words, 1)
    repeats, expected = 7, int(words.sum())
    times = max(1, int(budget_s / repeats / max(once_s, 1e-8)))
    told = [kernels.read_all(words, times) for _ in range(repeats)]
    seconds = tuple(seconds / times for seconds, _ in told)
    return Repeats(seconds), total == expected and all(found == expected for _, found in told)


def _ladder_by_torch(bench: ProbeBench, report: ProbeReport, sizes: list[int], levels: dict[str, int]) -> None:
    """Read bandwidth alone, and only of working sets so large that the call itself does not count."""
    import torch

    torch.set_num_threads(1)
    sizes = [size for size in sizes if size >= _FALLBACK_FROM_BYTES]
    rates, right = [], []
    for size in sizes:
        x = torch.ones(size // 4)
        took = bench.repeat(x.sum, budget_s=bench.budget_s / len(sizes), at_most=2000, warm_up=2)
        rates.append(size / took.median)
        right.append(float(x.sum()) == x.numel())
        if size == levels["memory"]:
            method = f"torch {torch.__version__} sum, 1 thread"
            report.rate("read", took, bytes=size, method=method, at={"level": "memory"}, working_set_bytes=size)
    report.curve("read", "working_set_bytes", list(map(float, sizes)), "bytes_per_s", rates)
    report.check("ladder_content", all(right), "known sums")
