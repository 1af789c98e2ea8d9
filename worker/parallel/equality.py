"""How close is equal: what a strategy's first steps gave, compared in numpy with what the reference's gave.

    of, against = Found.read(losses, files), Found.read(reference_losses, [reference_file])
    compare(of, against, steps=3, dtype="float32", adaptive=False)["weights"]["passed"]

Rounding differs, and steps amplify it: the tolerances grow in proportion to the steps. Every tensor must agree by
itself: a gradient by the norm of the difference over the norm, weights by the difference over how far they have moved.
What is rounding beside the largest number of all has no direction to compare, and passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchstone.results import Check

PER_STEP = {
    "float32": {"loss": 1e-5, "gradient": 1e-4, "weights": 1e-4},
    "bfloat16": dict.fromkeys(("loss", "gradient", "weights"), 2e-2),
}
"""Relative tolerances of one step; those after n steps are n times as wide."""
_NEGLIGIBLE = 0.5
"""Of the tolerance: a difference this small beside the largest number of all is rounding: of a bias before BatchNorm,
whose gradient is nothing else, or of one that sums over all pixels, most of which cancel."""
_TIMES_ROUNDING = 5
_TIMES_TURNED = 2
"""Some of the units that were turned over may do more than all of them together, but not much."""
_WIDEST = 0.1
"""Beyond it nothing would be proven: a gradient that one of two devices forgot is 0.5 and more apart."""
_EPSILON = 2e-7
_CANCELLED = 1e-6
"""Of the loss: where no number of a gradient is larger, the samples' shares cancelled, and what is left is rounding."""
ONLY_ROUNDING = "the whole gradient is rounding: all samples' cancel"
_NO_DIRECTION = 1e-5
"""Of the whole gradient's norm: below it a tensor's gradient is rounding, which Adam blows up to full steps."""
Arrays = dict[str, NDArray[Any]]
Moved = dict[str, dict[str, float]]
"""How far each tensor has moved, by what it is ("gradient/0/", "weights/")."""


@dataclass(frozen=True)
class Found:
    """What a strategy's, or the reference's, first steps gave."""

    losses: list[float]
    """Of each step, as the spec reduces it; NaN where it was none."""
    arrays: dict[str, NDArray[Any]]

    @classmethod
    def read(cls, losses: list[float], files: Iterable[Path]) -> Found:
        """Everything that the ranks wrote: each weight once, of the lowest rank that has it."""
        arrays: dict[str, NDArray[Any]] = {}
        for file in files:
            with np.load(file) as archive:
                arrays |= {name: archive[name] for name in archive.files if name not in arrays}
        return cls(losses, arrays)

    def part(self, prefix: str) -> dict[str, NDArray[Any]]:
        """The arrays whose names begin so, by the rest of their names."""
        return {name[len(prefix) :]: array for name, array in self.arrays.items() if name.startswith(prefix)}


def compare(
    of: Found,
    against: Found,
    steps: int,
    dtype: str,
    adaptive: bool,
    rounding: float = 0.0,
    turned: Moved | None = None,
) -> dict[str, dict[str, Any]]:
    """Loss, gradient and weights after `steps` steps: the fields of a Check row for each.

    `adaptive`: the optimiser divides by the gradient's own size (Adam), so that weights without a gradient to speak of
    move by rounding alone; they are left out. `rounding`: how far it alone moves a gradient of this model. `turned`:
    how far units at a kink move each tensor (`moved`): so much further each may be apart.
    """
    turned = turned or {}
    tolerances = {what: steps * one for what, one in PER_STEP[dtype].items()}
    unwidened = dict(tolerances)
    for what in ("gradient", "weights"):
        tolerances[what] = max(tolerances[what], min(_TIMES_ROUNDING * rounding, _WIDEST))
    loss = _closeness({"": np.array(of.losses)}, {"": np.array(against.losses)}, None, tolerances["loss"])
    worst: dict[str, Any] | None = None
    cancelled = [_cancelled(of, against, step) for step in range(steps)]
    # Adam makes full steps of a gradient that is rounding: what comes after has no direction to compare.
    aimless = next((step for step in range(steps) if adaptive and cancelled[step]), steps)
    for step in range(min(steps, aimless + 1)):
        slack = turned.get(f"gradient/{step}/", {})
        found = gradients_apart(of, against, step, tolerances["gradient"], unwidened["gradient"], slack)
        if worst is None or _quality(found) < _quality(worst):
            worst = found
    assert worst is not None
    idle = _without_direction(against, steps) if adaptive else frozenset()
    idle |= against.part("weights/").keys() if aimless < steps else frozenset()
    weights = _closeness(
        of.part("weights/"),
        against.part("weights/"),
        against.part("initial/"),
        tolerances["weights"],
        unwidened["weights"],
        idle,
        turned.get("weights/", {}),
        cancelled=_moved_by(of, against, cancelled, steps),
    )
    if idle:
        weights["detail"] = (
            f"{weights['detail'] or ''} left out, their gradient is rounding: {', '.join(sorted(idle)[:5])}"
        )
    return {"loss": loss, "gradient": worst, "weights": weights}


def gradients_apart(
    of: Found,
    against: Found,
    step: int,
    tolerance: float,
    unwidened: float | None = None,
    slack: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Whether the gradients of one step are equal within `tolerance`."""
    ours, theirs = (found.part(f"gradient/{step}/") for found in (of, against))
    cancelled = _cancelled(of, against, step)
    return _closeness(ours, theirs, None, tolerance, unwidened, slack=slack, cancelled=cancelled)


def _cancelled(of: Found, against: Found, step: int) -> float:
    """How large rounding may be in the gradient of a step that is nothing else; 0 where there is a gradient."""
    loss = abs(against.losses[step])
    largest = max(_largest(found.part(f"gradient/{step}/")) for found in (of, against))
    return _EPSILON * loss if math.isfinite(loss) and largest < _CANCELLED * loss else 0.0


def _moved_by(of: Found, against: Found, cancelled: list[float], steps: int) -> float:
    """How far such gradients may move weights: as far as they did, by their size; 0 where one step had a gradient."""
    if not all(cancelled):
        return 0.0
    gradient = max(_largest(found.part(f"gradient/{step}/")) for found in (of, against) for step in range(steps))
    start = against.part("initial/")
    moves = [{name: w - start[name] for name, w in f.part("weights/").items() if name in start} for f in (of, against)]
    return sum(cancelled) * max(map(_largest, moves)) / (gradient or 1.0)


def _largest(arrays: Arrays) -> float:
    return max((float(np.abs(a).max(initial=0.0)) for a in arrays.values() if a.dtype.kind == "f"), default=0.0)


def moved(of: Found, against: Found, steps: int) -> Moved:
    """How far each tensor of one is from the other's: gradients over their norms, weights over their movement.

    At most 1, so that a training which diverges in its first steps gives numbers, too.
    """

    def apart(prefix: str, start: Arrays) -> dict[str, float]:
        found = {}
        for name, b in against.part(prefix).items():
            if b.dtype.kind == "f":
                error = _norm(of.arrays[prefix + name].astype(np.float64) - b)
                if error > 0:
                    found[name] = min(1.0, error / (_norm(b.astype(np.float64) - start.get(name, 0.0)) or 1e-300))
        return found

    told = {f"gradient/{step}/": apart(f"gradient/{step}/", {}) for step in range(steps)}
    return told | {"weights/": apart("weights/", against.part("initial/"))}


def _quality(row: dict[str, Any]) -> tuple[bool, float]:
    """Orders rows: the least equal first."""
    return row["passed"], -(row.get("norm_rel_error") or 0.0)


def _without_direction(of: Found, steps: int) -> frozenset[str]:
    """The weights whose gradient, in some step, is nothing beside the whole gradient."""
    found: set[str] = set()
    for step in range(steps):
        norms = {name: _norm(array.astype(np.float64)) for name, array in of.part(f"gradient/{step}/").items()}
        whole = float(np.sqrt(sum(norm * norm for norm in norms.values())))
        found |= {name for name, norm in norms.items() if 0 < norm < _NO_DIRECTION * whole}
    return frozenset(found)


def distance(of: Found, against: Found) -> float:
    """How far the weights are apart, over how far they have moved: what BatchNorm per device changes."""
    found = _closeness(of.part("weights/"), against.part("weights/"), against.part("initial/"), 0.0)
    return float(found["norm_rel_error"] or 0.0)


def _closeness(
    ours: Arrays,
    theirs: Arrays,
    initial: Arrays | None,
    tolerance: float,
    unwidened: float | None = None,
    without: frozenset[str] = frozenset(),
    slack: dict[str, float] | None = None,
    cancelled: float = 0.0,
) -> dict[str, Any]:
    """Whether two sets of arrays are equal within `tolerance`, each by itself; the numbers told are of all together.

    NaNs in the same place are equal, and counted. `initial`: judge by how far each has moved from there. `unwidened`:
    the tolerance that decides what is negligible beside the largest number, where it is another one. `slack`: how much
    further than `tolerance` a tensor may be apart because of units at a kink. `cancelled`: how far any number may be.
    """
    if ours.keys() != theirs.keys():
        only = sorted(ours.keys() ^ theirs.keys())[:5]
        return _row(False, tolerance, 0.0, detail=f"on one side only: {', '.join(only)}")
    names = [name for name in theirs if theirs[name].dtype.kind == "f" and name not in without]
    misshapen = [name for name in names if ours[name].shape != theirs[name].shape]
    if misshapen:
        return _row(False, tolerance, 0.0, detail=f"of another shape: {', '.join(misshapen[:5])}")
    nan_count = sum(int(np.isnan(ours[name]).sum()) for name in names)
    if any(not np.array_equal(np.isfinite(ours[name]), np.isfinite(theirs[name])) for name in names):
        where = "not a number, or infinite, on one side only"
        return _row(False, tolerance, 0.0, nan_count=nan_count, detail=where)
    errors, moves, values = [], [], []
    for name in names:
        a, b = ours[name].astype(np.float64), theirs[name].astype(np.float64)
        finite = np.isfinite(b)
        start = initial[name].astype(np.float64) if initial else np.zeros_like(b)
        errors.append(np.abs(a - b)[finite])
        moves.append((b - start)[finite])
        values.append(np.abs(b[finite]))
    largest = max((float(np.abs(move).max(initial=0.0)) for move in moves), default=0.0)
    # What is rounding beside the largest movement, or of the numbers themselves, has no direction to compare.
    rounding = 0.0 if initial is None else _EPSILON * max((float(v.max(initial=0.0)) for v in values), default=0.0)
    atol = max((unwidened or tolerance) * largest * _NEGLIGIBLE, rounding, cancelled)
    ratios = {
        name: _norm(error) / (_norm(move) or 1e-300)
        for name, error, move in zip(names, errors, moves, strict=True)
        if float(error.max(initial=0.0)) > atol
    }
    excuses = {name: min(_TIMES_TURNED * each, _WIDEST) for name, each in (slack or {}).items()}
    apart = [name for name, ratio in ratios.items() if ratio > tolerance + excuses.get(name, 0.0)]
    excused = [name for name, ratio in ratios.items() if ratio > tolerance and name not in apart]
    error, move, value = (np.concatenate(rows) if rows else np.zeros(0) for rows in (errors, moves, values))
    norm = _norm(move)
    return _row(
        not apart,
        tolerance,
        atol,
        max_abs_error=float(error.max(initial=0.0)),
        max_rel_error=float((error[value > 0] / value[value > 0]).max(initial=0.0)),
        norm_rel_error=_norm(error) / norm if norm > 0 else None,
        bitwise=all(ours[name].tobytes() == theirs[name].tobytes() for name in names),
        nan_count=nan_count,
        detail=_in_words(apart, excused, excuses) or (ONLY_ROUNDING if cancelled else None),
        worst=max(ratios.values(), default=0.0),
    )


def _in_words(apart: list[str], excused: list[str], excuses: dict[str, float]) -> str | None:
    if apart:
        return f"apart: {', '.join(apart[:5])}"
    if excused:
        told = ", ".join(f"{name} (by up to {excuses[name]:.1e})" for name in excused[:5])
        return f"further apart, as units at the kink of their activation explain: {told}"
    return None


def _norm(values: NDArray[np.float64]) -> float:
    return float(np.sqrt((values * values).sum()))


def _row(passed: bool, rtol: float, atol: float, **more: Any) -> dict[str, Any]:
    return {"passed": passed, "rtol": rtol, "atol": atol, "worst": 0.0 if passed else math.inf, **more}


def check_rows(
    name: str, of: str, against: str, at: dict[str, Any], found: dict[str, dict[str, Any]], detail: str
) -> list[Check]:
    """A row for each of loss, gradient and weights."""
    rows = []
    for what, fields in found.items():
        said = f"{detail}; {fields['detail']}" if fields.get("detail") else detail
        rows.append(
            Check(
                name=name,
                of=of,
                against=against,
                at={**at, "what": what},
                **{**{k: v for k, v in fields.items() if k != "worst"}, "detail": said},
            )
        )
    return rows
