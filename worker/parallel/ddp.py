"""`ddp`: torch's DistributedDataParallel: a process per device, gradients summed in buckets while backward goes on.

    strategy = Ddp(setting, feed, rank, Group.join(setting, rank))

Its own hook sums each bucket instead of averaging it: the loss already is divided by the samples of the whole batch,
and an average of the ranks' means would be wrong for shares of different sizes. A rank whose share is empty takes part
with an empty tensor, so that nobody waits for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from worker.parallel import forms
from worker.parallel.clock import READY
from worker.parallel.single import Single


class Ddp(Single):
    """One rank of it."""

    def prepare(self) -> None:
        # Of 1x1 convolutions, whose two layouts are the same numbers in the same order.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
        unused = self._has_unused_parameters()
        self.wrapped = torch.nn.parallel.DistributedDataParallel(
            self.module,
            device_ids=None if self.setting.is_cpu else [self.device.index],
            forward_sync_buffers=False,  # BatchNorm's statistics stay each device's own
            find_unused_parameters=unused,
            gradient_as_bucket_view=True,
        )
        self.wrapped.register_comm_hook(None, lambda state, bucket: self._sum(bucket))

    def call(self, x: Tensor) -> Any:
        return self.wrapped(x)

    @contextmanager
    def last_part(self, is_last: bool) -> Iterator[None]:
        with nullcontext() if is_last else self.wrapped.no_sync():
            yield

    def computed(self) -> None:
        """The hook has marked it: by now the buckets have been waited for."""

    def _sum(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Called with each bucket as soon as its gradients are there: with the last, this rank's own work is done."""
        buffer = bucket.buffer()
        self.bytes_sent += 2 * (self.parts - 1) * buffer.nbytes // self.parts  # of a ring, which gloo and NCCL use
        self.clock.mark(READY)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return summed

    def _has_unused_parameters(self) -> bool:
        """Whether some weights take no part in the output: the reducer would wait for their gradients."""
        x, y = self.feed.train(torch.arange(min(2, self.feed.samples)))
        self.module.eval()  # leaves statistics and random numbers alone
        with forms.eager_here(self.setting.is_compiled):
            torch.nn.functional.cross_entropy(self.module(x).float(), y).backward()  # type: ignore[no-untyped-call]
        self.module.train()
        unused = any(p.grad is None for p in self.module.parameters())
        self.module.zero_grad()
        return unused
