"""Shards: how one global batch is shared out, and the random stream that goes with each share.

split_batch(torch.arange(10), 3)                 # [0 1 2 3], [4 5 6], [7 8 9]: sizes differ by one at most
with Stream(seed, device):                       # dropout in this thread draws from a stream of its own
    model(x)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def split_batch(batch: Tensor, parts: int) -> list[Tensor]:
    """`batch` in `parts` shares along its first dimension; the last ones are empty where there are too few rows."""
    return list(torch.tensor_split(batch, parts))


def accumulated(shard: Tensor, parts: int, largest: int) -> list[Tensor]:
    """A share in parts for gradient accumulation: as many on every rank, so that ranks that meet in each part meet.

    `largest`: the samples of the largest share; only shares smaller than it may have empty parts.
    """
    return split_batch(shard, max(1, min(parts, largest)))


class Stream(AbstractContextManager["Stream"]):
    """Everything random that a replica on `device` draws in this thread comes from a generator of its own.

    A GPU has a default generator to itself, which its kernels use whatever else they are given; one replica lives on
    it. CPUs have one for all threads: two replicas that drop out at once would share its numbers, in an order that
    differs from run to run.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = default_generator(device) if device.type == "cuda" else torch.Generator()
        self.generator.manual_seed(seed)
        self.draws: Any = nullcontext() if device.type == "cuda" else _DrawsFrom(self.generator)

    def __enter__(self) -> Stream:
        self.draws.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.draws.__exit__(*error)


class _DrawsFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is None and any(a.name == "generator" for a in func._schema.arguments):
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)


def default_generator(device: torch.device) -> torch.Generator:
    """What a layer on `device` draws from when it is told nothing; all but CUDA's draw from the CPU's."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def has_dropout(module: nn.Module) -> bool:
    """Whether a training step of this model draws random numbers."""
    return any(_chance(part) > 0 for part in module.modules()) or any(
        isinstance(part, nn.RReLU) for part in module.modules()
    )


def has_batch_norm(module: nn.Module) -> bool:
    """Whether this model has layers whose output for one sample depends on the others of its batch, in training or,
    by the statistics that are kept (InstanceNorm's may be), after it."""
    return any(_is_batch_norm(part) for part in module.modules())


def _is_batch_norm(part: nn.Module) -> bool:
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        return True
    return isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats


def scores_by_batch(module: nn.Module) -> bool:
    """Whether a trained model's output for one sample depends on the others: BatchNorm that keeps no statistics."""
    return any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None for part in module.modules()
    )


@contextmanager
def without_dropout(modules: list[nn.Module], off: bool = True) -> Iterator[None]:
    """Dropout is off until this ends (where `off` is told)."""
    parts = [part for module in modules for part in module.modules() if off]
    chances = [(part, _chance(part)) for part in parts if _chance(part) > 0]
    for part, _ in chances:
        _set_chance(part, 0.0)
    try:
        yield
    finally:
        for part, chance in chances:
            _set_chance(part, chance)


@contextmanager
def statistics_at_rest(module: nn.Module, at_rest: bool) -> Iterator[None]:
    """BatchNorm neither uses nor updates a batch's statistics until this ends: an empty share has none."""
    layers = [part for part in module.modules() if _is_batch_norm(part) and part.training]
    for layer in layers if at_rest else []:
        layer.eval()
    try:
        yield
    finally:
        for layer in layers if at_rest else []:
            layer.train()


def _chance(part: nn.Module) -> float:
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p
    chance = getattr(part, "dropout", 0.0)
    return float(chance) if isinstance(chance, (int, float)) else 0.0


def _set_chance(part: nn.Module, chance: float) -> None:
    if isinstance(part, nn.modules.dropout._DropoutNd):
        part.p = chance
    else:
        part.dropout = chance  # type: ignore[assignment]
