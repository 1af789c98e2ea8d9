"""Is this output the right one? Allclose first, else no further from the truth than twice eager's own distance.

    compare_outputs(variant, against=eager, truth=float64, tolerance=1e-4, eager=eager).passed

`truth` is the same model in float64 on the same input. NaNs in the same place are equal and counted; a one-sided NaN is
a failure. The rule is that of PyTorch's benchmarks/dynamo (`torch._dynamo.utils.same`), with the absolute tolerance
scaled by the output: a network whose outputs are all near 1e-6 would otherwise pass whatever it computes. Each tensor
has a scale of its own: a gradient of 1e-3 would otherwise pass beside one of 100 whatever it is.
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
CANCELLED = 1e-3
"""A tensor this much smaller than its largest neighbour may be what cancellation left (the gradient of a bias before a
batch normalisation is zero but for rounding): it is measured against this share of the neighbour."""
SMALLEST_NORMAL = 2.0**-126
"""Below it (float32's and bfloat16's) engines may flush to zero: such numbers are equal to zero and to each other."""


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

    Each tensor passes if close at rtol = `tolerance` and atol = `tolerance` x the largest value expected in it, or if
    its root mean square error to `truth` is at most twice that of `eager`. The absolute tolerance told is the largest.
    """
    if [a.shape for a in of] != [a.shape for a in against]:
        shapes = f"shapes {[list(a.shape) for a in of]} where {[list(a.shape) for a in against]} are expected"
        return Equality(False, tolerance, tolerance, None, None, None, False, 0, shapes)
    if [a.dtype for a in of] != [a.dtype for a in eager]:
        dtypes = f"dtypes {[str(a.dtype) for a in of]} where eager gives {[str(a.dtype) for a in eager]}"
        return Equality(False, tolerance, tolerance, None, None, None, False, 0, dtypes)
    ours, theirs = _flat(of), _flat(against)
    nan_count = int(np.isnan(ours).sum())
    finite = np.isfinite(theirs)
    largest = max((_largest(a) for a in against), default=0.0)
    atols = [max(tolerance * max(_largest(a), CANCELLED * largest), SMALLEST_NORMAL) for a in against]
    bitwise = all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(of, against, strict=True))
    same_holes = bool(
        np.array_equal(ours[~finite], theirs[~finite], equal_nan=True) and np.isfinite(ours[finite]).all()
    )
    atol = max(atols, default=0.0)
    if not same_holes:
        only_ours, only_theirs = np.isnan(ours) & ~np.isnan(theirs), np.isnan(theirs) & ~np.isnan(ours)
        endless = int((np.isinf(ours) != np.isinf(theirs)).sum())
        holes = f"{int(only_ours.sum())} NaN only here, {int(only_theirs.sum())} only there"
        holes += f", {endless} infinite on one side only (beyond what the dtype holds)" if endless else ""
        return Equality(False, tolerance, atol, None, None, None, bitwise, nan_count, holes)
    error = np.abs(ours[finite] - theirs[finite])
    size = np.abs(theirs[finite])
    passed, details = True, list[str]()
    for index, (mine, expected, exact, eagers, within) in enumerate(zip(of, against, truth, eager, atols, strict=True)):
        if _close(mine, expected, within, tolerance):
            continue
        my_error, eager_error = _rmse(mine, exact), _rmse(eagers, exact)
        excused = eager_error > 0 and my_error <= 2 * eager_error
        passed = passed and excused
        which = f"tensor {index} of {len(of)}: " if len(of) > 1 else ""
        word = "within" if excused else "beyond"
        rmse = f"(RMSE {my_error:.3g} against {eager_error:.3g})"
        details.append(f"{which}not close, and {word} twice eager's error to float64 {rmse}")
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
        "; ".join(sorted(details, key=lambda d: " beyond " not in d)[:3]) or None,
    )


def _close(of: Array, against: Array, atol: float, rtol: float) -> bool:
    """Whether all finite values expected are met; that the others agree was seen before."""
    ours, theirs = of.astype(np.float64), against.astype(np.float64)
    finite = np.isfinite(theirs)
    error, size = np.abs(ours[finite] - theirs[finite]), np.abs(theirs[finite])
    return bool((error <= atol + rtol * size).all())


def _largest(array: Array) -> float:
    values = np.abs(array.astype(np.float64))
    return float(values[np.isfinite(values)].max(initial=0.0))


def _flat(arrays: list[Array]) -> NDArray[np.float64]:
    return np.concatenate([a.ravel().astype(np.float64) for a in arrays]) if arrays else np.empty(0)


def _rmse(values: Array, truth: Array) -> float:
    wide, exact = values.astype(np.float64), truth.astype(np.float64)
    both = np.isfinite(wide) & np.isfinite(exact)
    return float(np.sqrt(np.mean((wide[both] - exact[both]) ** 2))) if both.any() else 0.0
