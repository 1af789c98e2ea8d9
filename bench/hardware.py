"""Memory and GEMM figures of the `hardware` probes against STREAM and a plain torch loop, in interleaved pairs.

    python bench/hardware.py [--pairs 7] [--seconds 1.5]

STREAM is written here by its own definition (static arrays, its four loops, OpenMP, the best of ten but the first,
scalar 3) and built with the system's gcc: `gcc -O3 -march=native -fopenmp`, which is how a user would. The plain loop
is `torch.mm` on float32 matrices, the best of as many repeats. A pair is one run of the probe and one of the other, in
random order, each in a fresh process, on all cores. Told: the ratio ours / theirs of the medians over pairs with its
95 % interval. Held to within 5 %: missed only if the whole interval lies beyond, undecided if it is wider than that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

WITHIN = 0.05
SIZE = 1024
KERNELS = ("copy", "scale", "add", "triad")

STREAM = r"""
#include <stdio.h>
#include <omp.h>
#ifndef NTIMES
#define NTIMES 10
#endif
static double a[N], b[N], c[N];
int main(void) {
    double best[4] = {1e9, 1e9, 1e9, 1e9}, scalar = 3.0;
    const double bytes[4] = {2, 2, 3, 3};
    const char *names[4] = {"copy", "scale", "add", "triad"};
#pragma omp parallel for
    for (long j = 0; j < N; j++) { a[j] = 1.0; b[j] = 2.0; c[j] = 0.0; }
    for (int k = 0; k < NTIMES; k++) {
        double t[5];
        t[0] = omp_get_wtime();
#pragma omp parallel for
        for (long j = 0; j < N; j++) c[j] = a[j];
        t[1] = omp_get_wtime();
#pragma omp parallel for
        for (long j = 0; j < N; j++) b[j] = scalar * c[j];
        t[2] = omp_get_wtime();
#pragma omp parallel for
        for (long j = 0; j < N; j++) c[j] = a[j] + b[j];
        t[3] = omp_get_wtime();
#pragma omp parallel for
        for (long j = 0; j < N; j++) a[j] = b[j] + scalar * c[j];
        t[4] = omp_get_wtime();
        for (int i = 0; i < 4 && k > 0; i++)
            if (t[i + 1] - t[i] < best[i]) best[i] = t[i + 1] - t[i];
    }
    for (int i = 0; i < 4; i++) printf("%s %.9g\n", names[i], bytes[i] * 8 * N / best[i]);
    fprintf(stderr, "%g\n", a[N / 2] + b[N / 2] + c[N / 2]);
    return 0;
}
"""


def build_stream(folder: Path, array_bytes: int) -> Path:
    """The program, with arrays of the same size as the probe's."""
    compiler = shutil.which("gcc")
    if compiler is None:
        raise SystemExit("gcc is needed to build STREAM")
    source, program = folder / "stream.c", folder / "stream"
    source.write_text(STREAM)
    flags = ["-O3", "-march=native", "-fopenmp", "-mcmodel=medium", f"-DN={array_bytes // 8}L"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    return program


def their_stream(program: Path, cores: tuple[int, ...], seconds: float) -> dict[str, float]:
    """Bytes a second of each kernel, the best within `seconds` (one run of ten repeats at least)."""
    import time

    best: dict[str, float] = {}
    end_s = time.monotonic() + seconds
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "OMP_PROC_BIND": "true"}
    while not best or time.monotonic() < end_s:
        told = subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=True).stdout
        for line in told.splitlines():
            name, rate = line.split()
            best[name] = max(best.get(name, 0.0), float(rate))
    return best


def our_stream(seconds: float) -> dict[str, float]:
    """The probe's figures on all cores."""
    from worker.hardware import memory, native
    from worker.hardware.places import scopes
    from worker.hardware.probe import ProbeReport

    with tempfile.TemporaryDirectory() as folder:
        bench = _bench(Path(folder))
        kernels = native.load(scratch=bench.folder)
        assert isinstance(kernels, native.Kernels), kernels
        report = ProbeReport("memory")
        memory._stream(bench, report, kernels, scopes(bench)[-1], seconds)
        assert all(check.passed for check in report.checks)
        return {row.name.removeprefix("stream_"): row.value or 0.0 for row in report.readings}


def our_gemm(seconds: float) -> float:
    """The probe's float32 figure for one size on all cores."""
    import torch

    from worker.hardware import gemm

    with tempfile.TemporaryDirectory() as folder:
        bench = _bench(Path(folder))
        torch.set_num_threads(len(bench.cores))
        a, b = gemm._operands(SIZE, "float32", "cpu", 0)
        took = bench.repeat(gemm._product(a, b, "float32"), budget_s=seconds)
        return 2 * SIZE**3 / took.best


def their_gemm(seconds: float) -> float:
    """What anybody would write."""
    import time

    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    torch.mm(a, b)
    best_s, end_s = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        begun_s = time.perf_counter()
        torch.mm(a, b)
        best_s = min(best_s, time.perf_counter() - begun_s)
    return 2 * SIZE**3 / best_s


def _bench(folder: Path) -> Any:
    from worker.bench import Bench
    from worker.hardware.probe import ProbeBench

    local = Bench.local(folder)
    return ProbeBench(local.cores, tuple(local.devices), folder, 16 << 30, 1.0)


def fresh(call: Callable[[], Any]) -> Any:
    """`call()` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, call))
    process.start()
    theirs.close()
    value = ours.recv()
    process.join()
    return value


def _answer(pipe: Connection, call: Callable[[], Any]) -> None:
    pipe.send(call())


def tell(name: str, ours: list[float], theirs: list[float], unit: str) -> None:
    """Print the ratio: held with the whole interval within, missed with all of it beyond, else undecided."""
    from worker.measure.statistics import compare

    found = compare(np.array(theirs), np.array(ours))  # medians of ours over theirs
    low, high = found.interval
    within, beyond = low >= 1 - WITHIN and high <= 1 + WITHIN, high < 1 - WITHIN or low > 1 + WITHIN
    verdict = "held" if within else "missed" if beyond else "not missed, but too wide to be held"
    medians = f"{np.median(ours) / 1e9:.2f} against {np.median(theirs) / 1e9:.2f} {unit}"
    print(f"{name}: {medians}, ratio {found.ratio:.3f} [{low:.3f}, {high:.3f}]: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    from worker.hardware.memory import array_bytes

    cores = tuple(sorted(os.sched_getaffinity(0)))
    draw = random.Random(0)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in (*KERNELS, "gemm")}
    with tempfile.TemporaryDirectory() as folder:
        size, _ = array_bytes(_bench(Path(folder)), cores)
        program = build_stream(Path(folder), size)
        for _ in range(max(options.pairs, 7)):
            told: dict[int, Any] = {}
            ways = [partial(our_stream, options.seconds), partial(their_stream, program, cores, options.seconds)]
            for side in draw.sample((0, 1), 2):
                told[side] = fresh(ways[side])
            for kernel in KERNELS:
                for side in (0, 1):
                    found[kernel][side].append(told[side][kernel])
            gemms = [partial(our_gemm, options.seconds), partial(their_gemm, options.seconds)]
            for side in draw.sample((0, 1), 2):
                found["gemm"][side].append(fresh(gemms[side]))
    print(f"{len(found['gemm'][0])} pairs, {len(cores)} cores, arrays of {size} bytes, GEMM of {SIZE} in float32")
    for name, (ours, theirs) in found.items():
        tell(name, ours, theirs, "GFLOP/s" if name == "gemm" else "GB/s")


if __name__ == "__main__":
    main()
