"""Is this output the right one? Allclose first, else no further from the truth than twice eager's own distance.

    compare_outputs(variant, against=eager, truth=float64, tolerance=1e-4, eager=eager).passed

`truth` is the same model in float64 on the same input. NaNs in the same place are equal and counted; a one-sided NaN is
a failure. The rule is that of PyTorch's benchmarks/dynamo (`torch._dynamo.utils.same`), with the absolute tolerance
scaled by the output: a network whose outputs are all near 1e-6 would otherwise pass whatever it computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

TOLERANCES = {"float32": 1e-4, "bfloat16": 1.6e-2, "float64": 1e-10}
"""bfloat16's is torch.testing's own: its numbers are 0.4 % apart, so a smaller one would ask for equality of bits."""
TRAINING_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Equality:
    """How two outputs agree; the fields are those of a Check row."""

    passed: bool
    rtol: float
    atol: float
    max_abs_error: float | None
    max_rel_error: float | None
    norm_rel_error: float | None
    bitwise: bool
    nan_count: int
    detail: str | None


def compare_outputs(
    of: list[Array], against: list[Array], truth: list[Array], tolerance: float, eager: list[Array]
) -> Equality:
    """Compare the tensors of one output with those of another, in order.

    Passed if close at rtol = `tolerance` and atol = `tolerance` x the largest value expected, or if the root mean
    square error to `truth` is at most twice that of `eager`.
    """
    if [a.shape for a in of] != [a.shape for a in against]:
        shapes = f"shapes {[list(a.shape) for a in of]} where {[list(a.shape) for a in against]} are expected"
        return Equality(False, tolerance, tolerance, None, None, None, False, 0, shapes)
    ours, theirs, exact = _flat(of), _flat(against), _flat(truth)
    nan_count = int(np.isnan(ours).sum())
    finite = np.isfinite(theirs)
    scale = float(np.abs(theirs[finite]).max(initial=0.0))
    atol = tolerance * scale
    bitwise = all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(of, against, strict=True))
    same_holes = bool(
        np.array_equal(ours[~finite], theirs[~finite], equal_nan=True) and np.isfinite(ours[finite]).all()
    )
    if not same_holes:
        only_ours, only_theirs = np.isnan(ours) & ~np.isnan(theirs), np.isnan(theirs) & ~np.isnan(ours)
        holes = f"{int(only_ours.sum())} NaN only here, {int(only_theirs.sum())} only there, or infinities that differ"
        return Equality(False, tolerance, atol, None, None, None, bitwise, nan_count, holes)
    error = np.abs(ours[finite] - theirs[finite])
    size = np.abs(theirs[finite])
    close = bool((error <= atol + tolerance * size).all())
    detail: str | None = None
    passed = close
    if not close:
        mine, eagers = _rmse(ours, exact), _rmse(_flat(eager), exact)
        passed = eagers > 0 and mine <= 2 * eagers
        word = "within" if passed else "beyond"
        detail = f"not close, and {word} twice eager's error to float64 (RMSE {mine:.3g} against {eagers:.3g})"
    norm = float(np.sqrt((size * size).sum()))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = error / size
    return Equality(
        passed,
        tolerance,
        atol,
        float(error.max(initial=0.0)),
        float(relative[size > 0].max(initial=0.0)),
        float(np.sqrt((error * error).sum())) / norm if norm > 0 else None,
        bitwise,
        nan_count,
        detail,
    )


def _flat(arrays: list[Array]) -> NDArray[np.float64]:
    return np.concatenate([a.ravel().astype(np.float64) for a in arrays]) if arrays else np.empty(0)


def _rmse(values: NDArray[np.float64], truth: NDArray[np.float64]) -> float:
    both = np.isfinite(values) & np.isfinite(truth)
    return float(np.sqrt(np.mean((values[both] - truth[both]) ** 2))) if both.any() else 0.0
