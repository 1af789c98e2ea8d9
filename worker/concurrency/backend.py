"""The puzzle's step as one writes it with a backend that schedules: DistributedDataParallel, one process a CPU device.

    backend = Backend(step, rank=0, meeting="/.../meeting")
    backend.prepare(); backend.run()           # spans: forward, backward, reduce 2, reduce 1, update

DDP hooks into autograd: as soon as a layer's gradient is there its sum with the other device's is begun, while backward
goes on with the layer below. Nothing in `run` says so; the order comes from the graph. The spans `reduce` are read by a
communication hook that does what DDP's own does.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from worker.concurrency.step import DEVICES, RATE, Step, compare

_PATIENCE_S = 60


class Backend:
    """One device's share of the step."""

    def __init__(self, step: Step, rank: int, meeting: str) -> None:
        self.step, self.rank, self.meeting = step, rank, meeting
        self.spans: list[tuple[str, float, float]] = []

    def prepare(self) -> None:
        """Meet the other device, build the model, and take steps until DDP has settled its buckets."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            store=torch._C._distributed_c10d.FileStore(self.meeting, DEVICES),
            rank=self.rank,
            world_size=DEVICES,
            timeout=timedelta(seconds=_PATIENCE_S),
        )
        x, target = self.step.batch()
        self.x, self.target = x.chunk(DEVICES)[self.rank], target.chunk(DEVICES)[self.rank]
        self.scale = DEVICES / len(x)  # DDP takes the mean over devices of what is to be a sum
        self.expected, self.initial = self.step.expected(), self.step.weights()
        features, dtype = self.step.features, self.step.torch_dtype
        self.model = nn.Sequential(
            nn.Linear(features, features, bias=False, dtype=dtype),
            nn.ReLU(),
            nn.Linear(features, features, bias=False, dtype=dtype),
        )
        weight_mb = self.initial[0].numel() * self.initial[0].element_size() / 2**20
        self.ddp = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=weight_mb / 2)
        self.ddp.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self._reset()
        for _ in range(3):
            self.run()
            self.verify()

    def run(self) -> list[tuple[str, float, float]]:
        """The step; see the module."""
        self.spans = []
        begun_s = time.perf_counter()
        self.optimizer.zero_grad()
        loss = ((self.ddp(self.x) - self.target) ** 2).sum() * self.scale
        forward_s = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter()
        self.optimizer.step()
        self.spans += [
            ("forward", begun_s, forward_s),
            ("backward", forward_s, backward_s),
            ("update", backward_s, time.perf_counter()),
        ]
        return self.spans

    def verify(self) -> dict[str, Any]:
        """Compare this device's weights with the right ones; then all is as it was before the step."""
        found = compare([p.detach() for p in self.model.parameters()], self.expected, self.step.tolerance)
        self._reset()
        return found

    def _reset(self) -> None:
        with torch.no_grad():
            for parameter, initial in zip(self.model.parameters(), self.initial, strict=True):
                parameter.copy_(initial)

    def _reduce(self, bucket: Any) -> Any:
        """Sum a bucket over the devices and divide by their number, as DDP does by itself; note when."""
        layer = 2 if bucket.index() == 0 else 1
        begun_s = time.perf_counter()
        gradient = bucket.buffer().div_(DEVICES)
        future = dist.all_reduce(gradient, async_op=True).get_future()

        def done(made: Any) -> Any:
            self.spans.append((f"reduce {layer}", begun_s, time.perf_counter()))
            return made.value()[0]

        return future.then(done)
