"""`single`: one device takes the whole batch. Also the shape of every strategy: what a rank does in one step.

    strategy = Single(setting, feed)
    strategy.restart()                       # initial weights, a new optimiser, the random stream at its beginning
    strategy.step(indices, learning_rate)    # one global batch; (sum of the losses, samples) of this rank's share
    strategy.evaluate()                      # (right answers, samples) of this rank's share of the test set

The loss that is differentiated is the sum over the share's samples, divided (for `mean`) by the samples of the whole
batch: gradients then simply add up over ranks, whatever the shares' sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from worker.parallel import forms
from worker.parallel.clock import END, INPUT, READY, SYNCED, clock_of
from worker.parallel.feed import Feed
from worker.parallel.group import Group
from worker.parallel.optimizers import make_optimizer, set_learning_rate
from worker.parallel.setting import Setting, stream_seed
from worker.parallel.shards import accumulated, split_batch, statistics_at_rest

Share = tuple[Tensor, int]
"""The sum of the losses of a rank's share of a batch (a tensor, not waited for), and how many samples it has."""


class Single:
    """One rank of a data-parallel strategy; with a group of one, the whole of it."""

    tells_all = True
    """Whether rank 0 can tell all weights."""
    meets_in_forward = False
    """Whether ranks wait for one another in the forward pass, so that all must run it equally often."""

    def __init__(self, setting: Setting, feed: Feed, rank: int = 0, group: Group | None = None) -> None:
        self.setting, self.feed, self.rank = setting, feed, rank
        self.group = group or Group()
        self.device = forms.device_of(setting, rank)
        self.parts, self.part = (setting.world_size, rank) if setting.splits_batch else (1, 0)
        self.clock = clock_of(self.device)
        self.bytes_sent = 0
        """So far, by this rank, for its gradients."""
        self.module = forms.trainable(setting, rank, self.group)
        if setting.is_compiled:
            forms.compile_in_place(self.module)
        shares = split_batch(torch.empty(setting.batch_size), self.parts)
        parts = accumulated(shares[self.part], setting.spec.gradient_accumulation, len(shares[0]))
        self.compiled_sizes = {len(part) for part in parts}
        """The samples of which a call is compiled, those of a full batch; others are too few calls to repay it."""
        self.prepare()
        self.initial = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
        self.optimizer = make_optimizer(setting.spec.optimizer, self.module.parameters())

    @property
    def modules(self) -> list[nn.Module]:
        """What this process trains: one a device."""
        return [self.module]

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        if not self.setting.is_cpu:
            torch.accelerator.synchronize(self.device)

    def prepare(self) -> None:
        """What a strategy does to `module` before the first step."""

    def restart(self) -> None:
        """Everything that training changes is as it was at the start."""
        with torch.no_grad():
            for name, value in self.module.state_dict().items():
                value.copy_(self.initial[name])
        self.optimizer = make_optimizer(self.setting.spec.optimizer, self.module.parameters())
        self.module.zero_grad()
        torch.manual_seed(stream_seed(self.setting.spec.seed, self.rank))
        self.bytes_sent = 0
        self.clock.take()

    def step(self, batch: Tensor, learning_rate: float) -> Share:
        """Train on the global batch with these indices."""
        self.clock.begin()
        share = self.forward_backward(batch)
        self.synchronize()
        self.clock.mark(SYNCED)
        self.update(learning_rate)
        self.clock.mark(END)
        return share

    def forward_backward(self, batch: Tensor) -> Share:
        """Leave this rank's part of the batch's gradient in `.grad`; what the share's losses add up to."""
        self.module.zero_grad()
        shards = split_batch(batch, self.parts)
        shard = shards[self.part]
        scale = 1 / len(batch) if self.setting.spec.loss_reduction == "mean" else 1.0
        total = torch.zeros((), device=self.device)
        parts = accumulated(shard, self.setting.spec.gradient_accumulation, len(shards[0]))
        for number, part in enumerate(parts):
            x, y = self.feed.train(part)
            if number == 0:
                self.clock.mark(INPUT)
            with self.last_part(number == len(parts) - 1):
                loss = self.loss_of(x, y)
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self.computed()
        return total, len(shard)

    def computed(self) -> None:
        """This rank's own part of the gradient is there."""
        self.clock.mark(READY)

    @contextmanager
    def last_part(self, is_last: bool) -> Iterator[None]:
        """Around forward and backward of each part of a share (gradient accumulation)."""
        yield

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of the samples' losses."""
        with (
            statistics_at_rest(self.module, len(x) == 0 and self.setting.spec.batch_norm == "per_device"),
            forms.eager_here(self.setting.is_compiled and len(x) not in self.compiled_sizes),
            forms.precision(self.setting),
        ):
            output = self.call(x)
        return nn.functional.cross_entropy(output.float(), y, reduction="sum")

    def call(self, x: Tensor) -> Any:
        """The output of what is trained."""
        return self.module(x)

    def synchronize(self) -> None:
        """Have every rank hold the sum of all ranks' gradients."""

    def update(self, learning_rate: float) -> None:
        """One step of the optimiser."""
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> tuple[int, int]:
        """(right answers, samples) of this rank's share of the test set: together each sample once."""
        kept = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self.group.mean_of_buffers(self.module)
        self.module.eval()
        shards = split_batch(torch.arange(self.feed.test_samples), self.parts)
        at_once = max(1, self.setting.spec.eval_batch_size // self.parts)
        right = 0
        with forms.eager_here(self.setting.is_compiled):
            for indices in split_batch(shards[self.part], math.ceil(len(shards[0]) / at_once)):
                if len(indices) or self.meets_in_forward:
                    x, y = self.feed.test(indices)
                    with forms.precision(self.setting):
                        right += int((self.module(x).argmax(1) == y).sum())
        self.module.train()
        for name, buffer in self.module.named_buffers():
            buffer.copy_(kept[name])
        return right, len(shards[self.part])

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """All weights and statistics by the plain model's names; a strategy may return what this rank holds of them.

        BatchNorm's running statistics are the mean over the ranks.
        """
        state = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
        for name, buffer in self.module.named_buffers():
            if buffer.is_floating_point() and name in state:
                state[name] = self.group.allreduce(buffer.clone()).div_(self.group.world_size)
        return state

    def gradients(self) -> dict[str, Tensor]:
        """Of the last batch, by the plain model's names; none for what the batch did not touch."""
        return {name: p.grad.detach() for name, p in self.module.named_parameters() if p.grad is not None}

    def state(self) -> dict[str, Tensor]:
        """All that training has changed on this rank: weights, statistics, optimiser, random stream; flat and whole."""
        state = {f"module/{name}": value for name, value in self.module.state_dict().items()}
        for number, p in enumerate(self._optimized()):
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    state[f"optimizer/{number}/{key}"] = value
        state["random/cpu"] = torch.get_rng_state()
        if self.setting.is_cuda:
            state["random/cuda"] = torch.cuda.get_rng_state(self.device)
        return {name: _local(value.detach()) for name, value in state.items()}

    @torch.no_grad()
    def resume(self, state: dict[str, Tensor]) -> None:
        """Be as the rank was whose `state` this is; in place, so that the layout in memory stays the model's."""
        self.restart()
        for name, value in self.module.state_dict().items():
            _local(value).copy_(state[f"module/{name}"])
        parameters = self._optimized()
        for name in (name for name in state if name.startswith("optimizer/")):
            _, number, key = name.split("/")
            p, value = parameters[int(number)], state[name]
            # A counter of steps is no tensor like the weight, even where the weight is a single number.
            if key != "step":
                like = torch.zeros_like(p)
                _local(like).copy_(value)
                value = like
            self.optimizer.state[p][key] = value
        torch.set_rng_state(state["random/cpu"])
        if self.setting.is_cuda:
            torch.cuda.set_rng_state(state["random/cuda"], self.device)

    def _optimized(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def spread(self) -> float | None:
        """The largest difference between two ranks' weights; None where no weight is held twice."""
        return self.group.spread([p.detach() for p in self.module.parameters()])

    def marks(self) -> list[list[list[float]]]:
        """The clock's readings since the last call, for each device of this rank."""
        return [self.clock.take()]

    def shares(self, share: Share) -> list[Share]:
        """What `step` gave, device by device."""
        return [share]


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that is shared out over all (FSDP2); of any other, all of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: Tensor = tensor.to_local()
    return local
