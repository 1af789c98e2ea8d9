"""A stream of matrix products of which each needs the one before, and whose exact result is known at every length.

    chain = Chain(256, torch.float32, torch.device("cpu"), seed=0)
    for _ in range(7):
        chain.step()                 # x <- E x: a dense 256 x 256 product
    chain.check()["bitwise"]         # True

E moves every row down by one, and the last one to the top. Its entries are 0 and 1, so every product is exact in any
floating-point type and order of summation, and x after any number of steps is known without computing it. A product too
few, or a number that was read a step too early, shows. To the engine E is a dense matrix like any other; because it is
mostly zeros a GPU may draw less power than it would for other numbers, and clock a little higher.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]


class Chain:
    """x <- E x on one device, without allocating: two buffers take turns. `steps` counts the products so far."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        name = str(dtype).removeprefix("torch.")
        self.start = first_matrix(size, name, seed)
        self.shift = torch.from_numpy(shift_matrix(size, name)).to(device)
        self.x = torch.from_numpy(self.start).to(device, copy=True)
        self.y = torch.empty_like(self.x)
        self.steps = 0

    def step(self) -> None:
        """One product: queued on a device that works by itself, done on one that does not."""
        torch.mm(self.shift, self.x, out=self.y)
        self.x, self.y = self.y, self.x
        self.steps += 1

    def expected(self) -> Array:
        """What x is after the steps so far: (n, n)."""
        return after(self.start, self.steps)

    def check(self) -> dict[str, Any]:
        """Whether x is exactly what it must be; the fields are those of a Check row."""
        return exactly(self.x.cpu().numpy(), self.expected())


def first_matrix(size: int, dtype: str, seed: int) -> Array:
    """The first x: (n, n) normal numbers."""
    return np.random.default_rng(seed).standard_normal((size, size)).astype(dtype)


def shift_matrix(size: int, dtype: str) -> Array:
    """E, (n, n)."""
    return np.roll(np.eye(size, dtype=dtype), 1, axis=0)


def after(start: Array, steps: int) -> Array:
    """E to the power of `steps`, times `start`."""
    return np.roll(start, steps, axis=0)


def exactly(found: Array, expected: Array) -> dict[str, Any]:
    """The fields of a Check row for results that must agree in every bit."""
    if found.shape != expected.shape:
        shapes = f"shape {list(found.shape)} where {list(expected.shape)} is expected"
        return {"passed": False, "bitwise": False, "detail": shapes}
    same = bool(np.array_equal(found, expected, equal_nan=True))
    error = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    nan_count = int(np.isnan(found).sum())
    largest = float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))
    return {
        "passed": same,
        "bitwise": same,
        "rtol": 0.0,
        "atol": 0.0,
        "max_abs_error": largest if np.isfinite(largest) else None,
        "nan_count": nan_count,
    }
