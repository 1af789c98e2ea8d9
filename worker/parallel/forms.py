"""The form in which a model is trained: its device, memory layout, BatchNorm over all ranks, compiled.

    module = trainable(setting, rank, group)
    with precision(setting):                    # autocast where the spec asks for bfloat16
        output = module(x)

Names and shapes of the weights stay those of the plain model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from worker import models
from worker.parallel.group import Group
from worker.parallel.setting import Setting


def device_of(setting: Setting, rank: int) -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cpu") if setting.is_cpu else torch.device(setting.kind, setting.index_of(rank))


def plain(setting: Setting, rank: int = 0) -> nn.Module:
    """The model as the spec describes it, with its initial weights, on this rank's device."""
    return models.build(setting.spec.fitted_model, setting.spec.seed).to(device_of(setting, rank))


def trainable(setting: Setting, rank: int, group: Group) -> nn.Module:
    """The plain model, made fast as the spec allows; not compiled yet."""
    module = plain(setting, rank)
    spec = setting.spec
    if setting.is_channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if spec.batch_norm == "synchronized" and group.world_size > 1 and setting.splits_batch:
        _replace(module, nn.modules.batchnorm._BatchNorm, lambda part: SynchronizedBatchNorm(part, group))
    return module


def compile_in_place(module: nn.Module) -> None:
    """Have calls of `module` go through torch.compile, for shapes of their own each.

    `module.compile()` compiles torch's own `_call_impl`, which Dynamo passes over; what it finds below is compiled only
    where it is no code of torch itself: of an `nn.Sequential` nothing, and nothing says so. Hence a call of our own.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        return module._call_impl(*arguments, **named)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(call, dynamic=False)


def eager_here(eager: bool) -> AbstractContextManager[Any]:
    """What is compiled runs as it was written: for the few steps of another shape, which do not repay a compilation."""
    return torch.compiler.set_stance("force_eager") if eager else nullcontext()


def precision(setting: Setting) -> AbstractContextManager[Any]:
    """The number format of the spec for what is computed under it."""
    if setting.spec.dtype == "float32":
        return nullcontext()
    return torch.autocast(setting.kind, torch.bfloat16)


def _replace(module: nn.Module, kind: type[nn.Module], make: Any) -> None:
    for name, child in module.named_children():
        if isinstance(child, kind):
            new = make(child)
            if new is not child:
                setattr(module, name, new)
        else:
            _replace(child, kind, make)


class _SumOverRanks(torch.autograd.Function):
    """allreduce with a gradient: what each rank's sum depends on is every rank's input."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.allreduce(tensor.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.allreduce(gradients[0].contiguous().clone()), None


class SynchronizedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm whose statistics in training are of the whole batch over all ranks; an empty share counts as none.

    torch's own SyncBatchNorm refuses CPU tensors.
    """

    def __init__(self, plain: nn.modules.batchnorm._BatchNorm, group: Group) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        self.weight, self.bias = plain.weight, plain.bias
        for name, buffer in plain.named_buffers(recurse=False):
            setattr(self, name, buffer)
        self.group = group

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dimensions from 2 on: the plain layer was built for the right one."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it meets the other ranks
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        given, x = x.dtype, x.float()  # statistics are float32, as torch's own layer has them under autocast
        over = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        count = x.new_full((1,), x.numel() / self.num_features)
        sums: Tensor = _SumOverRanks.apply(torch.cat([x.sum(over), count]), self.group)  # type: ignore[no-untyped-call]
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = x - mean.view(shape)
        squares: Tensor = _SumOverRanks.apply((centred * centred).sum(over), self.group)  # type: ignore[no-untyped-call]
        variance = squares / total
        self._remember(mean.detach(), variance.detach() * total / (total - 1).clamp(min=1))
        y = centred * torch.rsqrt(variance.view(shape) + self.eps)
        if self.weight is not None:
            y = y * self.weight.view(shape)
        y = y if self.bias is None else y + self.bias.view(shape)
        return y.to(given)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if not self.track_running_stats:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, now in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(now.to(running.dtype), share)
