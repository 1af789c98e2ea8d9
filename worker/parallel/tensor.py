"""`tensor`: the model split inside its layers: of two that follow each other, each rank holds some of the inner units.

The first of a pair is cut by its outputs (its columns), so that every rank computes some of the inner units from the
whole input; the second by its inputs (its rows), so that the ranks' partial outputs add up. One sum forward and one
backward per pair; what stands between the two works unit by unit (Shoeybi et al. 2019, Megatron-LM). Every rank takes
the whole batch.

Pairs are found among Linear and Conv2d layers of a Sequential, and in the preset transformer's blocks, where a rank
holds some of the attention's heads. Layers without a partner are held by all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.models.presets import Attention, Block
from worker.parallel.clock import Clock
from worker.parallel.group import Group
from worker.parallel.setting import stream_seed
from worker.parallel.single import Share, Single

_UNIT_BY_UNIT = (
    nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Identity,
    nn.Dropout, nn.AvgPool2d, nn.MaxPool2d,
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two layers that are cut together: (holder, name) of each; `units` must not be cut apart."""

    columns: list[tuple[nn.Module, str]]
    row: tuple[nn.Module, str]
    between: list[tuple[nn.Module, str]]
    unit: int = 1


class TensorParallel(Single):
    """One rank: some of the inner units of every pair."""

    meets_in_forward = True

    def prepare(self) -> None:
        self.cuts: dict[str, tuple[int, slice, torch.Size]] = {}
        names = {part: name for name, part in self.module.named_modules()}
        self.random: list[UnitDropout] = []
        for pair in list(pairs(self.module, self.setting.world_size)):
            width = getattr(*pair.columns[0]).weight.shape[0]
            mine = share_of(width, pair.unit, self.rank, self.setting.world_size)
            for holder, name in pair.columns:
                self._replace(holder, name, names[holder], mine, dim=0)
            self._replace(*pair.row, names[pair.row[0]], mine, dim=1)
            for holder, name in pair.between:
                if type(getattr(holder, name)) is nn.Dropout:
                    dropout = UnitDropout(getattr(holder, name).p)
                    setattr(holder, name, dropout)
                    self.random.append(dropout)

    def restart(self) -> None:
        super().restart()
        # Activations that all ranks hold must be dropped out alike.
        torch.manual_seed(stream_seed(self.setting.spec.seed, 0))
        for number, dropout in enumerate(self.random):
            dropout.generator.manual_seed(stream_seed(self.setting.spec.seed + number, self.rank))

    def state(self) -> dict[str, Tensor]:
        streams = {f"random/{number}": d.generator.get_state() for number, d in enumerate(self.random)}
        return super().state() | streams

    def resume(self, state: dict[str, Tensor]) -> None:
        super().resume(state)
        for number, dropout in enumerate(self.random):
            dropout.generator.set_state(state[f"random/{number}"])

    def forward_backward(self, batch: Tensor) -> Share:
        loss, samples = super().forward_backward(batch)
        return (loss, samples) if self.rank == 0 else (torch.zeros_like(loss), 0)

    def evaluate(self) -> tuple[int, int]:
        """All ranks compute, rank 0 counts."""
        counted = super().evaluate()
        return counted if self.rank == 0 else (0, 0)

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        return self._whole({name: value.detach() for name, value in self.module.state_dict().items()})

    def gradients(self) -> dict[str, Tensor]:
        return self._whole(super().gradients())

    def spread(self) -> float | None:
        """Over the weights that every rank holds."""
        return self.group.spread([p.detach() for name, p in self.module.named_parameters() if name not in self.cuts])

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as the plain model has them: every rank adds its part to zeros."""
        whole = {}
        for name, tensor in tensors.items():
            if name in self.cuts:
                dim, mine, shape = self.cuts[name]
                full = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
                full.narrow(dim, mine.start, mine.stop - mine.start).copy_(tensor)
                whole[name] = self.group.allreduce(full)
            else:
                whole[name] = tensor.clone()
        return whole

    def _replace(self, holder: nn.Module, name: str, prefix: str, mine: slice, dim: int) -> None:
        layer = getattr(holder, name)
        path = f"{prefix}.{name}" if prefix else name
        self.cuts[f"{path}.weight"] = (dim, mine, layer.weight.shape)
        if dim == 0 and layer.bias is not None:
            self.cuts[f"{path}.bias"] = (0, mine, layer.bias.shape)
        setattr(holder, name, (Columns if dim == 0 else Rows)(layer, mine, self))


class Columns(nn.Module):
    """Some outputs of a layer, from its whole input."""

    def __init__(self, layer: Any, mine: slice, strategy: TensorParallel) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach()[mine].clone())
        self.bias = nn.Parameter(layer.bias.detach()[mine].clone()) if layer.bias is not None else None
        self.apply_weight = _application(layer)
        self.talk = Talk(strategy)

    def forward(self, x: Tensor) -> Tensor:
        x = _SumOfGradients.apply(x, self.talk)  # type: ignore[no-untyped-call]
        y: Tensor = self.apply_weight(x, self.weight, self.bias)
        return y


class Rows(nn.Module):
    """A layer's outputs, from some of its inputs: the ranks' parts are summed, then the bias is added once."""

    def __init__(self, layer: Any, mine: slice, strategy: TensorParallel) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach()[:, mine].clone())
        self.bias = nn.Parameter(layer.bias.detach().clone()) if layer.bias is not None else None
        self.apply_weight = _application(layer)
        self.bias_shape = [-1] + [1] * (layer.weight.dim() - 2)
        self.talk = Talk(strategy)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _SumOfOutputs.apply(self.apply_weight(x, self.weight, None), self.talk)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.view(self.bias_shape)


class UnitDropout(nn.modules.dropout._DropoutNd):
    """Dropout of inner units, of which each rank has others: from a random stream of its own."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = torch.empty(x.shape).bernoulli_(1 - self.p, generator=self.generator).to(x.device)
        return x * kept / (1 - self.p)


class Talk:
    """How the layers of one rank sum with the others': timed, and counted."""

    def __init__(self, strategy: TensorParallel) -> None:
        self.strategy = strategy

    def allreduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in a tensor of its own."""
        group: Group = self.strategy.group
        clock: Clock = self.strategy.clock
        total = tensor.contiguous().clone()
        with clock.talking():
            group.allreduce(total)
        self.strategy.bytes_sent += 2 * (group.world_size - 1) * total.nbytes // group.world_size
        return total


class _SumOfGradients(torch.autograd.Function):
    """The input as it is; every rank's part of its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, talk: Talk) -> Tensor:
        ctx.talk = talk
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return (ctx.talk.allreduce(gradients[0]) if ctx.needs_input_grad[0] else None), None


class _SumOfOutputs(torch.autograd.Function):
    """Every rank's part of the output, summed; the gradient goes to all as it is."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, talk: Talk) -> Tensor:
        return talk.allreduce(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def share_of(width: int, unit: int, rank: int, world_size: int) -> slice:
    """The rank's share of `width` outputs, whole units only."""
    ends = torch.tensor_split(torch.arange(width // unit), world_size)
    before = sum(len(part) for part in ends[:rank])
    return slice(before * unit, (before + len(ends[rank])) * unit)


def pairs(module: nn.Module, world_size: int) -> Iterator[Pair]:
    """The layers that can be cut together into so many parts, none empty."""
    for part in module.modules():
        found: list[Pair] = []
        if isinstance(part, Attention):
            columns: list[tuple[nn.Module, str]] = [(part, name) for name in ("query", "key", "value")]
            found = [Pair(columns, (part, "output"), [], part.head_width)]
        elif isinstance(part, Block):
            found = [Pair([(part, "linear1")], (part, "linear2"), [(part, "activation")])]
        elif isinstance(part, nn.Sequential):
            found = list(_pairs_in(part))
        for pair in found:
            holder, name = pair.columns[0]
            if getattr(holder, name).weight.shape[0] // pair.unit >= world_size:
                yield pair


def _pairs_in(layers: nn.Sequential) -> Iterator[Pair]:
    first: str | None = None
    between: list[tuple[nn.Module, str]] = []
    for name, layer in layers.named_children():
        if _can_be_cut(layer):
            if first is not None and isinstance(layers.get_submodule(first), nn.Conv2d) == isinstance(layer, nn.Conv2d):
                yield Pair([(layers, first)], (layers, name), between)
                first = None
            else:
                first = name
            between = []
        elif isinstance(layer, _UNIT_BY_UNIT):
            between.append((layers, name))
        else:
            first, between = None, []


def _can_be_cut(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros"
    return type(layer) is nn.Linear


def _application(layer: nn.Module) -> Any:
    """How this layer's weight and bias act on an input."""
    if isinstance(layer, nn.Conv2d):
        stride, padding, dilation = layer.stride, layer.padding, layer.dilation

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return nn.functional.conv2d(x, weight, bias, stride, padding, dilation)

        return convolve
    return nn.functional.linear
