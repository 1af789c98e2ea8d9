"""The chapter's `run(x)` in the process of one CPU device: so many products of a matrix with itself, all results held.

    products = Products(size=4000, repeats=50, dtype="float32", seed=0)
    products.prepare()                  # the matrix, the right answer, and its distance to float64
    products.run()                      # [[start_s, end_s], ...] of each product, by the machine's clock
    products.verify()                   # every result is compared; then all are overwritten with NaN

Because results are poisoned between runs, one that was not computed, or was read before it was there, is seen. The
matrix is drawn anew for each device, so that one device's result is never right for another.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from typing import Any

import torch
from torch import Tensor

from worker.measure.roofline import Work

ROWS_CHECKED = 8
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}
"""Largest difference to the expected results, which are about normally distributed: kernels may sum in another order
from call to call."""


class Products:
    """One device's work. `target` is memory for the results that another process sees too."""

    def __init__(
        self, size: int, repeats: int, dtype: str, seed: int, target: mmap.mmap | None = None, tell: int | None = None
    ) -> None:
        """`tell`: a file descriptor that gets a byte for every product that is done."""
        self.size, self.repeats, self.seed, self.tell = size, repeats, seed, tell
        self.dtype, self.tolerance = getattr(torch, dtype), TOLERANCE[dtype]
        self.results = buffers(target, repeats, size, self.dtype)

    def prepare(self) -> dict[str, Any]:
        """Seconds of the first product, and how far it is from float64 on a few rows."""
        self.x = matrix(self.size, self.dtype, self.seed)
        self.results.fill_(torch.nan)
        begun_s = time.perf_counter()
        self.expected = self.x @ self.x
        first_call_s = time.perf_counter() - begun_s
        return {"first_call_s": first_call_s, **against_float64(self.x, self.expected)}

    def run(self, threads: int = 1) -> list[list[float]]:
        """[start_s, end_s] of each product; with `threads`, each takes every so-many-th."""
        if threads == 1:
            return [self._product(i) for i in range(self.repeats)]
        spans: list[list[float]] = [[] for _ in range(self.repeats)]
        all_of_them = torch.get_num_threads()

        def work(first: int) -> None:
            # Else a new thread would begin with a team of all cores of the machine.
            torch.set_num_threads(max(1, all_of_them // threads))
            for i in range(first, self.repeats, threads):
                spans[i] = self._product(i)

        workers = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        torch.set_num_threads(all_of_them)  # MKL keeps one number for all threads
        return spans

    def verify(self) -> dict[str, Any]:
        """The first wrong result, if any, and the largest difference; then all results are poisoned."""
        return verified(self.results, self.expected, self.tolerance)

    def _product(self, i: int) -> list[float]:
        start_s = time.perf_counter()
        torch.mm(self.x, self.x, out=self.results[i])
        end_s = time.perf_counter()
        if self.tell is not None:
            os.write(self.tell, b".")
        return [start_s, end_s]


def matrix(size: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    """(size, size) normal numbers, scaled so that those of their product have deviation 1 too."""
    generator = torch.Generator().manual_seed(seed)
    values: Tensor = torch.randn(size, size, generator=generator, dtype=dtype) / size**0.25
    return values.to(device)


def buffers(target: mmap.mmap | None, repeats: int, size: int, dtype: torch.dtype) -> Tensor:
    """(repeats, size, size) for results, in the shared memory `target` where there is one."""
    if target is None:
        return torch.empty(repeats, size, size, dtype=dtype)
    return torch.frombuffer(target, dtype=dtype, count=repeats * size * size).view(repeats, size, size)


def work_of(size: int, dtype: str, products: int, copies: int = 0) -> Work:
    """Of products, each of which reads two matrices and writes one, and of copies, which read one and write one."""
    matrix_bytes = size**2 * getattr(torch, dtype).itemsize
    return Work(2 * size**3 * products, (3 * products + 2 * copies) * matrix_bytes)


def against_float64(x: Tensor, product: Tensor) -> dict[str, float]:
    """The largest error of the product's first rows, absolute and relative to the largest value there."""
    exact = x[:ROWS_CHECKED].double() @ x.double()
    error = float((product[:ROWS_CHECKED].double() - exact).abs().max())
    return {"max_abs_error": error, "max_rel_error": error / max(float(exact.abs().max()), 1e-300)}


def verified(results: Tensor, expected: Tensor, tolerance: float) -> dict[str, Any]:
    """Compare every one of `results` (n, size, size) with `expected`, then fill them with NaN."""
    errors = [float((result - expected).abs().max()) for result in results]
    results.fill_(torch.nan)
    return summed_up(errors, tolerance)


def summed_up(errors: list[float], tolerance: float) -> dict[str, Any]:
    """The first that is wrong, how many were compared, and the largest difference, NaN where any is none."""
    wrong = next((i for i, error in enumerate(errors) if not error <= tolerance), None)  # a NaN is not <= anything
    worst = torch.nan if any(error != error for error in errors) else max(errors)
    return {"wrong": wrong, "max_abs_error": worst, "compared": len(errors)}
