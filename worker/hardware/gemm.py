"""The probe `gemm`: how fast the largest matrices that are worth it are multiplied, by type and by cores or GPU.

The published peak of a type is the best of square sizes from 256 on. Some types have only a naive way on some CPUs (at
1 GFLOP/s a product of 2048 takes a minute): each size is begun only while the one before says that it fits the budget.
int8 products count 2 n^3 operations like the others. Every product is checked against float64 on some rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from worker.hardware.places import pinned, scopes
from worker.hardware.probe import ProbeBench, ProbeReport, Repeats

SIZES = (256, 512, 1024, 2048, 4096, 8192)
TYPES = {"float32": 0.5, "bfloat16": 0.2, "int8": 0.1, "float64": 0.2}
"""With their shares of the time."""
GPU_TYPES = ("float32", "tf32", "bfloat16", "float16", "int8", "float64")
_TOLERANCE = {"float32": 1e-5, "tf32": 3e-3, "bfloat16": 2e-2, "float16": 3e-3, "int8": 0.0, "float64": 1e-12}
"""Relative to the largest of the right answers."""
_ROWS = 16
_LARGEST_ON_CPU = 2048
_REPEATS = 7


def run(bench: ProbeBench) -> ProbeReport:
    """Measure it."""
    report = ProbeReport("gemm")
    groups = scopes(bench)
    for scope in groups:
        # The threads of torch's pool are made with the affinity of the thread that first needs them.
        with pinned(scope.cores):
            torch.set_num_threads(len(scope.cores))
            for dtype, share in TYPES.items():
                bench.progress(f"GEMM in {dtype} on {len(scope.cores)} cores")
                budget_s = bench.budget_s / (len(groups) + len(bench.gpus)) * share
                at = {"dtype": dtype, "device_type": "cpu", **scope.at}
                method = f"torch {torch.__version__}, threads: {len(scope.cores)}"
                _peak(bench, report, dtype, "cpu", at, method, budget_s)
    if not bench.gpus:
        report.skip("gpu", "this job holds no GPU")
    for index, device in enumerate(bench.gpus):  # not yet run on a GPU
        for dtype in GPU_TYPES:
            bench.progress(f"GEMM in {dtype} on {device.name}")
            budget_s = bench.budget_s / (len(groups) + len(bench.gpus)) / len(GPU_TYPES)
            at = {"dtype": dtype, "device_type": "cuda", "device": device.name}
            torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
            _peak(bench, report, dtype, f"cuda:{index}", at, f"torch {torch.__version__}, cuBLAS", budget_s)
    return report


def _peak(
    bench: ProbeBench, report: ProbeReport, dtype: str, device: str, at: dict[str, Any], method: str, budget_s: float
) -> None:
    """Sizes as far as the budget goes; the best one is the figure, all of them are the curve."""
    found: dict[int, Repeats] = {}
    left_s, expected_s = budget_s, 0.0
    wait = torch.cuda.synchronize if device.startswith("cuda") else None
    for size in SIZES:
        too_large = size > _LARGEST_ON_CPU and device == "cpu"
        if too_large or (found and expected_s * (_REPEATS + 1) > left_s):
            break
        try:
            a, b = _operands(size, dtype, device, bench.seed)
            call = _product(a, b, dtype)
            took = bench.repeat(call, budget_s=budget_s / 5, at_least=_REPEATS, at_most=200, synchronize=wait)
        except (RuntimeError, NotImplementedError) as error:
            report.missing("gemm", "FLOP/s", " ".join(str(error).split())[:300], method=method, at=at)
            return
        found[size] = took
        left_s -= sum(took.seconds)
        # Eight times the work, if what grows is the product and not the call.
        expected_s = 8 * took.median
        _check(report, a, b, call(), dtype, {**at, "size": size})
    best = max(found, key=lambda size: size**3 / found[size].best)
    report.rate(
        "gemm",
        found[best],
        flop=2 * best**3,
        method=f"{method}, square matrices of {best}",
        at=at,
        working_set_bytes=_bytes(best, dtype),
    )
    x = [float(size) for size in found]
    report.curve("gemm", "size", x, "flop_per_s", [2 * size**3 / found[size].best for size in found], at)


def _operands(size: int, dtype: str, device: str, seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed + size)
    if dtype == "int8":
        a, b = (torch.randint(-127, 128, (size, size), generator=source, dtype=torch.int8) for _ in range(2))
    else:
        kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        a, b = (torch.randn(size, size, generator=source).to(kind) for _ in range(2))
    return a.to(device), b.to(device)


def _product(a: Tensor, b: Tensor, dtype: str) -> Callable[[], Tensor]:
    if dtype == "int8":
        return lambda: torch._int_mm(a, b)
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    return lambda: torch.mm(a, b, out=out)


def _check(report: ProbeReport, a: Tensor, b: Tensor, product: Tensor, dtype: str, at: dict[str, Any]) -> None:
    exact = a[:_ROWS].cpu().double() @ b.cpu().double()
    error = float((product[:_ROWS].cpu().double() - exact).abs().max() / exact.abs().max())
    tolerance = _TOLERANCE[dtype]
    report.check("gemm", error <= tolerance, "float64", at=at, rtol=tolerance, max_rel_error=error)


def _bytes(size: int, dtype: str) -> int:
    each = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "int8": 1}[dtype]
    return size * size * (2 * each + (4 if dtype == "int8" else each))
