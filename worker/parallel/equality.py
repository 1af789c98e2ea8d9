"""Equal, before fast: the reference that every strategy must equal in its first steps, and how close is equal.

    reference = Reference(setting)                     # in a process of its own, on the first device
    reference.run("reference.npz", steps=3, how="shards")
    compare(Path("ddp.0.check.npz"), Path("reference.npz"), ...)       # loss, gradient and weights, in numpy

The reference is one device with the plain model and the plain optimiser:

- `shards`: the k shares of each batch in turn, each with its rank's random stream and its rank's BatchNorm statistics,
  gradients weighted by samples. What a data-parallel strategy must give, whatever the model.
- `whole`: the batch unsplit, dropout off. What every strategy must give where a sample's output depends on that sample
  alone, and BatchNorm synchronised over ranks. For BatchNorm per device the distance from it is published.
- `rounds`: with BatchNorm synchronised and gradients accumulated, the parts that all ranks compute at once, in turn.
- `microbatches`: the parts that `pipeline` cuts a batch into, in turn, with one set of BatchNorm statistics.

Rounding differs, and steps amplify it: the tolerances grow in proportion to the steps. A gradient is compared by the
norm of the difference over the norm; weights by the difference over how far they have moved; both also pass where they
are close element by element (a gradient of nothing but rounding has no direction).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchstone.results import Check
from worker.parallel import forms
from worker.parallel.feed import Feed
from worker.parallel.optimizers import make_optimizer, set_learning_rate
from worker.parallel.setting import Course, Setting, stream_seed
from worker.parallel.shards import (
    accumulated,
    has_batch_norm,
    has_dropout,
    split_batch,
    without_dropout,
)
from worker.parallel.tensor import pairs

How = Literal["shards", "whole", "microbatches", "rounds"]
PER_STEP = {
    "float32": {"loss": 1e-5, "gradient": 1e-4, "weights": 1e-4},
    "bfloat16": dict.fromkeys(("loss", "gradient", "weights"), 2e-2),
}
"""Relative tolerances of one step; those after n steps are n times as wide."""
_NEGLIGIBLE = 1e-2
"""Of the tolerance: a difference this small beside the largest number of all is rounding (a bias before BatchNorm)."""
_NO_DIRECTION = 1e-5
"""Of the whole gradient's norm: below it a tensor's gradient is rounding, which Adam blows up to full steps."""
Arrays = dict[str, NDArray[Any]]


class Reference:
    """One device that computes what several are to give."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        Feed.write(setting)
        self.feed = Feed(setting, 0)
        self.course = Course(setting)

    def facts(self, devices: int) -> dict[str, Any]:
        """What the model has that decides which reference a strategy must equal."""
        module = forms.plain(self.setting)
        return {
            "has_batch_norm": has_batch_norm(module),
            "has_dropout": has_dropout(module),
            "layers": len(module) if isinstance(module, nn.Sequential) else 1,
            "pairs": {str(k): len(list(pairs(module, k))) for k in {1, devices}},
            "parameters": sum(p.numel() for p in module.parameters()),
            "state_bytes": sum(value.nbytes for value in module.state_dict().values()),
        }

    def test_file(self, file: str) -> list[int]:
        """Write the test set for those who load exported models; its labels."""
        torch.save((self.feed.x_test.cpu(),), file)
        labels: list[int] = self.feed.y_test.tolist()
        return labels

    def run(
        self, file: str, steps: int, how: How, dropout: bool, devices: int, batch_size: int
    ) -> list[tuple[float, int]]:
        """Train the first steps as so many devices would; write what they gave to `file`.

        Returns the summed loss and the samples of each step.
        """
        one = self.setting.devices[0]
        self.setting = setting = replace(self.setting, devices=(one,) * devices, batch_size=batch_size)
        self.feed.setting, self.course, spec = setting, Course(setting), setting.spec
        module = forms.plain(setting)
        optimizer = make_optimizer(spec.optimizer, module.parameters())
        arrays = {f"initial/{name}": _array(value) for name, value in module.state_dict().items()}
        streams = [_Stream(module, stream_seed(spec.seed, rank)) for rank in range(setting.world_size)]
        losses = []
        with without_dropout([module], not dropout):
            for step, batch in enumerate(self.feed.first_batches(steps, self.course)):
                optimizer.zero_grad()
                scale = 1 / len(batch) if spec.loss_reduction == "mean" else 1.0
                total = 0.0
                for rank, part in self._parts(batch, how):
                    with streams[rank]:
                        total += self._forward_backward(module, part, scale)
                losses.append((total, len(batch)))
                arrays |= {
                    f"gradient/{step}/{name}": _array(p.grad)
                    for name, p in module.named_parameters()
                    if p.grad is not None
                }
                set_learning_rate(optimizer, setting.learning_rate(step, self.course))
                optimizer.step()
        arrays |= {f"weights/{name}": _array(value) for name, value in module.state_dict().items()}
        ranks = streams if how == "shards" else streams[:1]
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and f"weights/{name}" in arrays:
                arrays[f"weights/{name}"] = np.mean([_array(stream.buffers[name]) for stream in ranks], axis=0)
        everything: dict[str, Any] = arrays
        np.savez(file, **everything)
        return losses

    def _parts(self, batch: Tensor, how: How) -> Iterable[tuple[int, Tensor]]:
        """(rank, indices) of what is computed in turn."""
        spec, setting = self.setting.spec, self.setting
        if how == "whole":
            return [(0, batch)]
        if how == "microbatches":
            return [(0, part) for part in accumulated(batch, spec.microbatches, len(batch))]
        shards = split_batch(batch, setting.world_size)
        largest = len(shards[0])
        if how == "rounds":
            cut = [accumulated(shard, spec.gradient_accumulation, largest) for shard in shards]
            return [(0, torch.cat(parts)) for parts in zip(*cut, strict=True)]
        return [
            (rank, part)
            for rank, shard in enumerate(shards)
            for part in accumulated(shard, spec.gradient_accumulation, largest)
        ]

    def _forward_backward(self, module: nn.Module, part: Tensor, scale: float) -> float:
        if len(part) == 0:
            return 0.0
        x, y = self.feed.train(part)
        with forms.precision(self.setting):
            output = module(x)
        loss = nn.functional.cross_entropy(output.float(), y, reduction="sum")
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


class _Stream(AbstractContextManager["_Stream"]):
    """A rank's random numbers and BatchNorm statistics: put into the model on the way in, kept on the way out."""

    def __init__(self, module: nn.Module, seed: int) -> None:
        self.module = module
        self.state = torch.Generator().manual_seed(seed).get_state()
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def __enter__(self) -> _Stream:
        torch.default_generator.set_state(self.state)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(self.buffers[name])
        return self

    def __exit__(self, *_: object) -> None:
        self.state = torch.default_generator.get_state()
        self.buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}


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


def compare(of: Found, against: Found, steps: int, dtype: str, adaptive: bool) -> dict[str, dict[str, Any]]:
    """Loss, gradient and weights after `steps` steps: the fields of a Check row for each.

    `adaptive`: the optimiser divides by the gradient's own size (Adam), so that weights without a gradient to speak of
    move by rounding alone; they are left out.
    """
    tolerances = {what: steps * one for what, one in PER_STEP[dtype].items()}
    loss = _closeness({"": np.array(of.losses)}, {"": np.array(against.losses)}, None, tolerances["loss"])
    worst: dict[str, Any] | None = None
    for step in range(steps):
        ours, theirs = of.part(f"gradient/{step}/"), against.part(f"gradient/{step}/")
        found = _closeness(ours, theirs, None, tolerances["gradient"])
        if worst is None or (worst["passed"], -(worst["norm_rel_error"] or 0)) > (
            found["passed"],
            -(found["norm_rel_error"] or 0),
        ):
            worst = found
    assert worst is not None
    idle = _without_direction(against, steps) if adaptive else frozenset()
    weights = _closeness(
        of.part("weights/"), against.part("weights/"), against.part("initial/"), tolerances["weights"], idle
    )
    if idle:
        weights["detail"] = (
            f"{weights['detail'] or ''} left out, their gradient is rounding: {', '.join(sorted(idle)[:5])}"
        )
    return {"loss": loss, "gradient": worst, "weights": weights}


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
    ours: Arrays, theirs: Arrays, initial: Arrays | None, tolerance: float, without: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Whether two sets of arrays are equal within `tolerance`, each by itself; the numbers told are of all together.

    NaNs in the same place are equal, and counted. `initial`: judge by how far each has moved from there.
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
    rounding = 0.0 if initial is None else 2e-7 * max((float(v.max(initial=0.0)) for v in values), default=0.0)
    atol = max(tolerance * largest * _NEGLIGIBLE, rounding)
    apart = [
        name
        for name, error, move in zip(names, errors, moves, strict=True)
        if float(error.max(initial=0.0)) > atol and _norm(error) > tolerance * _norm(move)
    ]
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
        detail=f"apart: {', '.join(apart[:5])}" if apart else None,
    )


def _norm(values: NDArray[np.float64]) -> float:
    return float(np.sqrt((values * values).sum()))


def _row(passed: bool, rtol: float, atol: float, **more: Any) -> dict[str, Any]:
    return {"passed": passed, "rtol": rtol, "atol": atol, **more}


def check_rows(
    name: str, of: str, against: str, at: dict[str, Any], found: dict[str, dict[str, Any]], detail: str
) -> list[Check]:
    """A row for each of loss, gradient and weights."""
    rows = []
    for what, fields in found.items():
        said = f"{detail}; {fields['detail']}" if fields.get("detail") else detail
        rows.append(Check(name=name, of=of, against=against, at={**at, "what": what}, **{**fields, "detail": said}))
    return rows


def _array(tensor: Tensor | None) -> NDArray[Any]:
    assert tensor is not None
    tensor = tensor.detach().cpu()
    array: NDArray[Any] = tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
    return array.copy()
