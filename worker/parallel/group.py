"""The group of ranks that sum tensors with one another: over gloo between CPU devices, over NCCL between GPUs.

    group = Group.join(setting, rank)
    group.allreduce(tensor)              # in place: every rank then holds the sum
    group.spread([weights])              # the largest difference between any two ranks' values

Ranks meet over a file that nobody used before: a TCP store would listen on every interface. An operation that waits
longer than the timeout raises; a rank that stands still is found long before (`worker.parallel.ranks`).
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from worker.parallel.setting import Setting

_TIMEOUTS = 3
"""Times `rank_timeout_s`: one rank may compile for longer than another."""
_THREADS_WAIT_S = 60
"""Threads of one process compute the same at once; a longer wait means that one has failed."""
How = Literal["sum", "min", "max"]
_OPERATIONS: dict[How, Any] = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Group:
    """This rank's membership; alone, every operation leaves its tensor as it is."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    @classmethod
    def join(cls, setting: Setting, rank: int) -> Group:
        """Meet the other ranks of this strategy. Raises where they do not come."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        world_size = setting.world_size
        device = None if setting.is_cpu else torch.device(setting.kind, setting.index_of(rank))
        if device is not None:
            torch.accelerator.set_device_index(device.index)
        dist.init_process_group(
            dist.get_default_backend_for_device(setting.kind),
            store=torch._C._distributed_c10d.FileStore(str(setting.file("meeting")), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_TIMEOUTS * setting.spec.rank_timeout_s),
            device_id=device,
        )
        return cls(rank, world_size)

    def allreduce(self, tensor: Tensor, how: How = "sum") -> Tensor:
        """Put the sum over all ranks (or the maximum, minimum) in the place of `tensor`."""
        if self.world_size > 1:
            dist.all_reduce(tensor, _OPERATIONS[how])
        return tensor

    def spread(self, tensors: list[Tensor]) -> float:
        """The largest difference between two ranks' values of the same number; NaN where only some are NaN."""
        widest = 0.0
        for tensor in tensors if self.world_size > 1 else []:
            value = tensor.detach().double()
            low = self.allreduce(value.nan_to_num(), "min")
            high = self.allreduce(value.nan_to_num(), "max")
            holes = value.isnan().double()
            few, many = self.allreduce(holes.clone(), "min"), self.allreduce(holes.clone(), "max")
            if not torch.equal(few, many):
                return float("nan")
            widest = max(widest, float((high - low).max()) if value.numel() else 0.0)
        return widest

    def mean_of_buffers(self, module: torch.nn.Module) -> None:
        """Put the mean over all ranks in the place of each floating-point buffer: BatchNorm's running statistics."""
        for buffer in module.buffers():
            if buffer.is_floating_point():
                self.allreduce(buffer).div_(self.world_size)


class ThreadGroup(Group):
    """The same between the threads of one process, each of which has a device of its own."""

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list[Tensor | None]) -> None:
        super().__init__(rank, len(slots))
        self._barrier, self._slots = barrier, slots

    @classmethod
    def of(cls, world_size: int) -> list[ThreadGroup]:
        """The memberships of all ranks of one group."""
        barrier, slots = threading.Barrier(world_size, timeout=_THREADS_WAIT_S), [None] * world_size
        return [cls(rank, barrier, slots) for rank in range(world_size)]  # type: ignore[arg-type]

    def allreduce(self, tensor: Tensor, how: How = "sum") -> Tensor:
        self._slots[self.rank] = tensor
        self._barrier.wait()
        # Each adds up in the same order, so that all hold the same bits.
        together = torch.stack([slot.to(tensor.device) for slot in self._slots if slot is not None])
        result = together.sum(0) if how == "sum" else together.amin(0) if how == "min" else together.amax(0)
        self._barrier.wait()
        return tensor.copy_(result)
