"""`fsdp`: torch's FSDP2: weights, gradients and optimiser state shared out, gathered layer by layer when needed.

Every layer that has weights is a unit of its own: gathered before its forward and backward, freed after. Gradients are
summed, not averaged: the loss already is divided by the samples of the whole batch. Ranks meet in every forward pass,
so a rank whose share is empty runs it all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from worker.parallel.single import Single


class Fsdp(Single):
    """One rank of it."""

    meets_in_forward = True

    def prepare(self) -> None:
        mesh = init_device_mesh(self.device.type, (self.setting.world_size,))
        for child in self.module.children():
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.units = [part for part in self.module.modules() if isinstance(part, FSDPModule)]
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor
        # What one gathering of all weights, or one reduction of all gradients, has a rank send.
        size, others = sum(p.numel() * p.element_size() for p in self.module.parameters()), self.setting.world_size - 1
        self._bytes_at_once = size * others // self.setting.world_size

    @contextmanager
    def last_part(self, is_last: bool) -> Iterator[None]:
        for unit in self.units:
            unit.set_requires_gradient_sync(is_last, recurse=False)
        yield
        # Weights are gathered for every forward and every backward, gradients reduced once.
        self.bytes_sent += (3 if is_last else 2) * self._bytes_at_once

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        return {name: _whole(value) for name, value in super().weights().items()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: _whole(gradient) for name, gradient in super().gradients().items()}

    def spread(self) -> float | None:
        """No weight is held twice."""
        return None


def _whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole
