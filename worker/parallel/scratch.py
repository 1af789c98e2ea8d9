"""`scratch`: the chapter's own data parallelism, in one process: split the batch, compute on each device, allreduce by
hand, update each replica. To be read beside the book's "Training on Multiple GPUs".

    strategy = Scratch(setting, feed)
    strategy.step(indices, learning_rate)

Where it differs from the book, and why:

- A replica per device is a copy of its own. (On CPU devices the book's `get_params` hands the same tensors to both,
  which then step twice as far.)
- `allreduce` writes in place. (Where it rebinds, replicas drift apart from four devices on.)
- The batch need not be divisible; each device's loss is divided by the samples of the whole batch, so that the
  gradients of all devices just add up.
- On CPUs the devices compute at the same time: each has a thread of its own, pinned to the device's cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from worker.parallel.clock import END, SYNCED
from worker.parallel.feed import Feed
from worker.parallel.group import ThreadGroup
from worker.parallel.setting import Setting, stream_seed
from worker.parallel.shards import Stream, has_dropout
from worker.parallel.single import Share, Single

T = TypeVar("T")


@torch.no_grad()
def allreduce(data: list[Tensor]) -> None:
    """Make every tensor of `data`, one from each device, the sum of them all; in place."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


class Scratch:
    """All devices of the job, in this process."""

    tells_all = True

    def __init__(self, setting: Setting, feed: Feed) -> None:
        self.setting, self.feed = setting, feed
        self.threads = [
            ThreadPoolExecutor(1, initializer=_live_on, initargs=(device.cores, setting.spec.threads))
            for device in setting.devices
        ]
        groups = ThreadGroup.of(setting.world_size)
        # One after the other: their initial weights come from the one default generator.
        self.replicas = [
            thread.submit(Single, setting, feed.on(rank), rank, groups[rank]).result()
            for rank, thread in enumerate(self.threads)
        ]
        self.is_random = has_dropout(self.replicas[0].module)
        self.bytes_sent = 0

    @property
    def modules(self) -> list[nn.Module]:
        return [replica.module for replica in self.replicas]

    def settle(self) -> None:
        for replica in self.replicas:
            replica.settle()

    def on_each_device(self, work: Callable[[int], T]) -> list[T]:
        """`work(rank)` on all devices at the same time; what each returned."""
        begun = [thread.submit(work, rank) for rank, thread in enumerate(self.threads)]
        return [one.result() for one in begun]

    def restart(self) -> None:
        self.on_each_device(lambda rank: self.replicas[rank].restart())
        # Only now: each replica's restart seeds the default generators of all devices.
        self.streams: list[Any] = [
            Stream(stream_seed(self.setting.spec.seed, rank), replica.device) if self.is_random else nullcontext()
            for rank, replica in enumerate(self.replicas)
        ]
        self.bytes_sent = 0

    def step(self, batch: Tensor, learning_rate: float) -> list[Share]:
        """Train on the global batch with these indices; each device's share."""
        for replica in self.replicas:
            replica.clock.catch_up()
        for replica in self.replicas:
            replica.clock.begin()
        shares = self.on_each_device(lambda rank: self.forward_backward(rank, batch))
        for gradients in zip(*(self.gradients_of(rank) for rank in range(len(self.replicas))), strict=True):
            allreduce(list(gradients))
            self.bytes_sent += (len(gradients) - 1) * gradients[0].nbytes  # by the first: the sum, to all others
        for replica in self.replicas:
            replica.clock.mark(SYNCED)
        self.on_each_device(lambda rank: self.replicas[rank].update(learning_rate))
        for replica in self.replicas:
            replica.clock.mark(END)
        return shares

    def forward_backward(self, rank: int, batch: Tensor) -> Share:
        """One device's share, with its own random stream."""
        with self.streams[rank]:
            return self.replicas[rank].forward_backward(batch)

    def gradients_of(self, rank: int) -> list[Tensor]:
        """One device's gradients, in the same order on each."""
        return [p.grad for p in self.replicas[rank].module.parameters() if p.grad is not None]

    def evaluate(self) -> tuple[int, int]:
        """(right answers, samples) of the test set: each sample once, shared out over the devices."""
        counts = self.on_each_device(lambda rank: self.replicas[rank].evaluate())
        return sum(right for right, _ in counts), sum(samples for _, samples in counts)

    def weights(self) -> dict[str, Tensor]:
        return self.on_each_device(lambda rank: self.replicas[rank].weights())[0]

    def gradients(self) -> dict[str, Tensor]:
        return self.replicas[0].gradients()

    def state(self) -> dict[str, Tensor]:
        """Of every replica, and of its random stream."""
        state: dict[str, Tensor] = {}
        for rank, replica in enumerate(self.replicas):
            state |= {f"{rank}/{name}": value for name, value in replica.state().items()}
            if self.is_random:
                state[f"{rank}/stream"] = self.streams[rank].generator.get_state()
        return state

    def resume(self, state: dict[str, Tensor]) -> None:
        self.restart()
        for rank, replica in enumerate(self.replicas):
            start = f"{rank}/"
            replica.resume({name.removeprefix(start): v for name, v in state.items() if name.startswith(start)})
        for rank, stream in enumerate(self.streams if self.is_random else []):
            stream.generator.set_state(state[f"{rank}/stream"])

    def spread(self) -> float | None:
        """The largest difference between two replicas' weights."""
        return self.on_each_device(lambda rank: self.replicas[rank].spread())[0]

    def marks(self) -> list[list[list[float]]]:
        return [replica.clock.take() for replica in self.replicas]

    def shares(self, share: list[Share]) -> list[Share]:
        return share


def _live_on(cores: tuple[int, ...], threads: int | None) -> None:
    """This thread, and those that it starts for its operations (one a core unless told), stay on a device's cores."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads or len(cores))
