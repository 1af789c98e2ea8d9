"""The probe `memory`: STREAM, bursts against single reads, latency by a pointer chase, NUMA.

STREAM (McCalpin, "Memory Bandwidth and Machine Balance", 1995): its four kernels on doubles, its byte counts (read plus
written; what a cache reads in order to write is not counted), its rule that each array is at least four times the last
cache, the best of all repeats but the first, and its check of what the arrays hold in the end. A figure whose arrays
are smaller, since memory is short, says in its method that it is one of a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.hardware import native
from worker.hardware.native import Kernels
from worker.hardware.places import (
    LINE_BYTES,
    Scope,
    last_level_bytes,
    memory,
    nodes,
    on_cores,
    pinned,
    random_cycle,
    scopes,
)
from worker.hardware.probe import ProbeBench, ProbeReport, Repeats

KERNELS = {"copy": 2, "scale": 2, "add": 3, "triad": 3}
"""Arrays that each reads and writes."""
SCALAR = 3.0
FEWEST_PASSES, MOST_PASSES = 10, 150  # each pass multiplies the numbers by 15: 15^150 is still a double
BURSTS_BYTES = (64, 256, 1024, 4096, 16384, 65536)
_READ_BYTES = 64 << 20
_ARRAY_BYTES = 64 << 20
_SHARES = {"stream": 0.6, "access": 0.25, "latency": 0.15}


def run(bench: ProbeBench) -> ProbeReport:
    """Measure it."""
    report = ProbeReport("memory")
    kernels = native.load(scratch=bench.folder)
    groups = scopes(bench)
    for scope in groups:
        bench.progress(f"STREAM on {len(scope.cores)} cores")
        budget_s = bench.budget_s * _SHARES["stream"] / len(groups)
        if isinstance(kernels, Kernels):
            _stream(bench, report, kernels, scope, budget_s)
        else:
            _stream_by_torch(bench, report, scope, budget_s)
    report.facts |= {"last_level_cache_bytes": last_level_bytes(bench.cores)}
    if isinstance(kernels, Kernels):
        bench.progress("sequential and random reads")
        _access(bench, report, kernels)
        bench.progress("latency")
        _latency(bench, report, kernels)
        _numa(bench, report, kernels)
    else:
        report.facts["kernels"] = kernels.reason
        for part in ("access", "latency", "numa"):
            report.skip(part, kernels.reason)
    return report


# -- STREAM -----------------------------------------------------------------------------------------------------


def array_bytes(bench: ProbeBench, cores: tuple[int, ...], arrays: int = 3) -> tuple[int, bool]:
    """Bytes of each array, and whether that is four times the last cache, as STREAM wants it."""
    wanted = max(4 * last_level_bytes(cores), _ARRAY_BYTES)
    fitting = bench.memory_bytes // 3 // arrays
    size = min(wanted, fitting) // 4096 * 4096
    return size, size >= wanted


def _stream(bench: ProbeBench, report: ProbeReport, kernels: Kernels, scope: Scope, budget_s: float) -> None:
    size, is_large = array_bytes(bench, scope.cores)
    threads = len(scope.cores)
    count = size // 8 // threads
    parts: list[list[NDArray[np.float64]]] = [[memory(count) for _ in range(3)] for _ in scope.cores]

    def touch(rank: int) -> None:
        for array, value in zip(parts[rank], (1.0, 2.0, 0.0), strict=True):
            kernels.fill(array, value)

    def passes(repeats: int) -> NDArray[np.float64]:
        """Seconds (repeats, 4): from the first thread's begin to the last one's end."""
        gate = np.zeros(1, dtype=np.int64)
        told = on_cores(scope.cores, lambda rank: kernels.stream(*_three(parts[rank]), repeats, threads, gate))
        begun, ended = np.stack([t[0] for t in told]), np.stack([t[1] for t in told])
        seconds: NDArray[np.float64] = ended.max(0) - begun.min(0)
        return seconds

    on_cores(scope.cores, touch)
    first = passes(2)  # STREAM leaves out the first
    wanted = int(budget_s / float(first[1].sum()))
    repeats = min(max(wanted - 2, FEWEST_PASSES), MOST_PASSES)
    seconds = np.concatenate([first[1:], passes(repeats)])
    method = f"STREAM's kernels, {kernels.method}, a pinned thread a core"
    _stream_rows(report, seconds, threads * count * 8, scope, method, is_large)
    error = max(_distance(parts, 2 + repeats))
    report.check("stream_arrays", error < 1e-12, "STREAM's arithmetic", at=scope.at, max_rel_error=error)


def _three(arrays: list[NDArray[np.float64]]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    a, b, c = arrays
    return a, b, c


def _stream_rows(
    report: ProbeReport, seconds: NDArray[np.float64], array: int, scope: Scope, method: str, is_large: bool
) -> None:
    if not is_large:
        method += "; arrays under four times the last cache: a figure of that cache"
    for index, (kernel, arrays) in enumerate(KERNELS.items()):
        report.rate(
            f"stream_{kernel}",
            Repeats(tuple(seconds[:, index].tolist())),
            bytes=arrays * array,
            method=method,
            at=scope.at,
            working_set_bytes=3 * array,
        )


def _distance(parts: list[list[NDArray[np.float64]]], passes: int) -> list[float]:
    """How far the arrays are from what STREAM's arithmetic gives, relative to it."""
    a, b, c = 1.0, 2.0, 0.0
    for _ in range(passes):
        c = a
        b = SCALAR * c
        c = a + b
        a = b + SCALAR * c
    return [
        float(max(abs(array.max() - value), abs(array.min() - value)) / value)
        for part in parts
        for array, value in zip(part, (a, b, c), strict=True)
    ]


def _stream_by_torch(bench: ProbeBench, report: ProbeReport, scope: Scope, budget_s: float) -> None:
    """The same four kernels as torch operations that write in place, on as many threads as cores."""
    import torch

    size, is_large = array_bytes(bench, scope.cores)
    with pinned(scope.cores):
        torch.set_num_threads(len(scope.cores))
        a, b, c = (torch.full((size // 8,), value, dtype=torch.float64) for value in (1.0, 2.0, 0.0))
        calls = (
            lambda: c.copy_(a),
            lambda: torch.mul(c, SCALAR, out=b),
            lambda: torch.add(a, b, out=c),
            lambda: torch.add(b, c, alpha=SCALAR, out=a),
        )
        seconds: list[list[float]] = []
        done = 0

        def one_pass() -> None:
            seconds.append([bench.repeat(call, budget_s=0, at_least=1, at_most=1, warm_up=0).best for call in calls])

        took = bench.repeat(one_pass, budget_s=budget_s, at_least=FEWEST_PASSES, at_most=MOST_PASSES)
        done = len(took.seconds) + 1
    method = f"STREAM's kernels by torch {torch.__version__}, threads: {len(scope.cores)}"
    _stream_rows(report, np.array(seconds[1:]), size // 8 * 8, scope, method, is_large)
    error = max(_distance([[a.numpy(), b.numpy(), c.numpy()]], done))
    report.check("stream_arrays", error < 1e-12, "STREAM's arithmetic", at=scope.at, max_rel_error=error)


# -- order of access --------------------------------------------------------------------------------------------


def _access(bench: ProbeBench, report: ProbeReport, kernels: Kernels) -> None:
    size, is_large = array_bytes(bench, bench.cores, arrays=1)
    words: NDArray[np.uint64] = memory(size // 2048 * 256, np.uint64)
    words[:] = np.random.default_rng(bench.seed).integers(0, 1 << 62, words.size, dtype=np.uint64)
    total = int(words.sum())  # modulo 2^64, as the kernel adds
    budget_s = bench.budget_s * _SHARES["access"] / (2 + len(BURSTS_BYTES))
    note = "" if is_large else "; under four times the last cache"
    right = []
    with pinned(bench.cores[:1]):
        ways = {"forward": partial(kernels.read_all, words, 1), "backward": partial(kernels.read_backwards, words)}
        for name, read in ways.items():
            took, sums = _timed(bench, read, budget_s)
            right += [found == total for found in sums]
            report.rate(
                "sequential_read",
                took,
                bytes=words.nbytes,
                method=f"{kernels.method}, 64-bit words{note}",
                at={"cores": 1, "direction": name},
                working_set_bytes=words.nbytes,
            )
        rates = []
        for burst_bytes in BURSTS_BYTES:
            rate, fits = _bursts(bench, report, kernels, words, burst_bytes, budget_s, note)
            rates.append(rate)
            right.append(fits)
    report.curve("random_read", "burst_bytes", list(map(float, BURSTS_BYTES)), "bytes_per_s", rates, at={"cores": 1})
    report.check("read_words", all(right), "the words that were written", at={"cores": 1}, bitwise=all(right))


def _timed(bench: ProbeBench, read: Callable[[], tuple[float, int]], budget_s: float) -> tuple[Repeats, list[int]]:
    """The kernel's own clock, again and again; and what it found each time."""
    told: list[tuple[float, int]] = []
    bench.repeat(lambda: told.append(read()), budget_s=budget_s)
    return Repeats(tuple(seconds for seconds, _ in told[1:])), [found for _, found in told]


def _bursts(
    bench: ProbeBench,
    report: ProbeReport,
    kernels: Kernels,
    words: NDArray[np.uint64],
    burst_bytes: int,
    budget_s: float,
    note: str,
) -> tuple[float, bool]:
    per_burst = burst_bytes // 8
    rows = words[: words.size // per_burst * per_burst].reshape(-1, per_burst)
    chosen = np.random.default_rng(bench.seed + burst_bytes).integers(0, len(rows), _READ_BYTES // burst_bytes)
    places = (chosen * per_burst).astype(np.uint64)
    took, sums = _timed(bench, lambda: kernels.read_bursts(words, places, per_burst), budget_s)
    reading = report.rate(
        "random_read",
        took,
        bytes=len(places) * burst_bytes,
        method=f"{kernels.method}, bursts at random places, many under way at once{note}",
        at={"cores": 1, "burst_bytes": burst_bytes},
        working_set_bytes=words.nbytes,
    )
    expected = int(rows.sum(1)[chosen].sum())
    assert reading.value is not None
    return reading.value, all(found == expected for found in sums)


def _latency(bench: ProbeBench, report: ProbeReport, kernels: Kernels) -> None:
    """On small pages, where most loads also miss the TLB, and on huge ones, where the kernel gives them."""
    size, is_large = array_bytes(bench, bench.cores, arrays=2)
    note = "" if is_large else "; partly in cache"
    for pages in ("small", "huge"):
        cycle = random_cycle(size, bench.seed, huge_pages=pages == "huge")
        at = {"cores": 1, "pages": pages}
        with pinned(bench.cores[:1]):
            took, steps, closed = chase(kernels, cycle, bench.budget_s * _SHARES["latency"] / 2)
        report.latency(
            "latency",
            took,
            count=steps,
            bytes=steps * LINE_BYTES,
            method=f"pointer chase over a random cycle, {kernels.method}{note}",
            at=at,
            working_set_bytes=cycle.nbytes,
        )
        report.check("chase_cycle", closed, "a single cycle over all lines", at=at)


def chase(kernels: Kernels, cycle: NDArray[np.uint64], budget_s: float) -> tuple[Repeats, int, bool]:
    """Seconds of repeats of so many steps each, and whether a whole round passed every line and led back.

    The first round is the warm-up and the proof; where a round is long, a repeat is part of one.
    """
    words_per_line = LINE_BYTES // 8
    lines = cycle.size // words_per_line
    end, total = kernels.walk(cycle, lines)
    closed = end == 0 and total == words_per_line * (lines * (lines - 1) // 2)
    trial = min(max(8, lines // 8 * 8), 1 << 15)
    took_s, place = kernels.chase(cycle, 0, trial)
    repeats = 12
    steps = max(8, int(budget_s / repeats / max(took_s / trial, 1e-10)) // 8 * 8)
    seconds = []
    for _ in range(repeats):
        repeat_s, place = kernels.chase(cycle, place, steps)
        seconds.append(repeat_s)
    return Repeats(tuple(seconds)), steps, closed


# -- NUMA -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """Cores of one node, memory of another."""

    cpu_node: int
    memory_node: int

    @property
    def at(self) -> dict[str, Any]:
        return {"cpu_node": self.cpu_node, "memory_node": self.memory_node}


def _numa(bench: ProbeBench, report: ProbeReport, kernels: Kernels) -> None:
    found = nodes(bench.cores)
    report.facts["numa_nodes"] = {str(node): list(cores) for node, cores in found.items()}
    if len(found) < 2:
        report.skip("numa", f"the cores of this job are on {len(found) or 'no known'} NUMA node")
        return
    size, _ = array_bytes(bench, bench.cores, arrays=2)
    for memory_node, home in found.items():
        with pinned(home[:1]):  # whoever writes first decides where it lies
            cycle = random_cycle(size, bench.seed)
        words = cycle[: cycle.size // 32 * 32]
        for cpu_node, cores in found.items():
            pair = _Pair(cpu_node, memory_node)
            with pinned(cores[:1]):
                took, steps, _ = chase(kernels, cycle, 0.3)
                read, _ = _timed(bench, partial(kernels.read_all, words, 1), 0.2)
            method = f"first touched by node {memory_node}, {kernels.method}"
            report.latency("numa_latency", took, count=steps, method=method, at=pair.at, working_set_bytes=cycle.nbytes)
            report.rate(
                "numa_read", read, bytes=words.nbytes, method=method, at=pair.at, working_set_bytes=words.nbytes
            )
