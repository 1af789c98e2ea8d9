"""`pipeline`: the model split by layers, GPipe's way: each rank holds a stage, microbatches follow one another.

    strategy = Pipeline(setting, feed, rank, group)
    strategy.step(indices, learning_rate)      # all microbatches forward, then all backward, then one update

A stage sends what it made of a microbatch to the next while it computes the following one. The layers are cut so that
the costliest stage is as cheap as can be, by multiplications counted. With m microbatches and k stages each device
idles (k - 1) / (m + k - 1) of the time (Huang et al. 2019, GPipe). BatchNorm sees microbatches: what that changes is
published beside the proof.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worker.parallel import forms
from worker.parallel.clock import END, INPUT, READY
from worker.parallel.shards import accumulated
from worker.parallel.single import Share, Single


class Pipeline(Single):
    """One rank: one stage."""

    tells_all = False

    def prepare(self) -> None:
        assert isinstance(self.module, nn.Sequential)
        x, _ = self.feed.train(torch.arange(min(2, self.feed.samples)))
        costs, shapes = _walk(self.module, x)
        cuts = [0, *balanced(costs, self.setting.world_size), len(self.module)]
        self.first, self.last = self.rank == 0, self.rank == self.setting.world_size - 1
        begin, end = cuts[self.rank], cuts[self.rank + 1]
        self.takes, self.gives = shapes[begin], shapes[end]
        for index in range(len(self.module)):
            if not begin <= index < end:
                self.module[index] = nn.Identity()  # the others' layers: names and order stay

    def step(self, batch: Tensor, learning_rate: float) -> Share:
        spec = self.setting.spec
        self.clock.begin()
        self.module.zero_grad()
        scale = 1 / len(batch) if spec.loss_reduction == "mean" else 1.0
        parts = accumulated(batch, spec.microbatches, len(batch))
        samples = [self.feed.train(part) for part in parts] if self.first or self.last else []
        self.clock.mark(INPUT)
        total = torch.zeros((), device=self.device)
        entered: list[Tensor] = []
        left: list[Tensor] = []
        sent = []
        for number, part in enumerate(parts):
            x = samples[number][0] if self.first else self._receive((len(part), *self.takes), self.rank - 1)
            if not self.first:
                x.requires_grad_()
            with forms.precision(self.setting):
                y = self.module(x).float()
            if self.last:
                loss = nn.functional.cross_entropy(y, samples[number][1], reduction="sum")
                total += loss.detach()
                y = loss * scale
            else:
                sent.append(self._send(y, self.rank + 1))
            entered.append(x)
            left.append(y)
        for x, y in zip(entered, left, strict=True):
            gradient = None if self.last else self._receive(y.shape, self.rank + 1)
            if y.requires_grad:
                torch.autograd.backward(y, gradient)
            if not self.first:
                assert x.grad is not None
                sent.append(self._send(x.grad, self.rank - 1))
        with self.clock.talking():
            for work, _ in sent:
                work.wait()
        self.clock.mark(READY)
        self.update(learning_rate)
        self.clock.mark(END)
        return total, len(batch) if self.last else 0

    @torch.no_grad()
    def evaluate(self) -> tuple[int, int]:
        """The last stage counts every sample of the test set, once."""
        self.module.eval()
        right = 0
        everything = torch.arange(self.feed.test_samples)
        for indices in torch.split(everything, self.setting.spec.eval_batch_size):
            x, y = self.feed.test(indices)
            if not self.first:
                x = self._receive((len(indices), *self.takes), self.rank - 1)
            with forms.precision(self.setting):
                output = self.module(x).float()
            if self.last:
                right += int((output.argmax(1) == y).sum())
            else:
                work, _ = self._send(output, self.rank + 1)
                work.wait()
        self.module.train()
        return right, len(everything) if self.last else 0

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Of this stage."""
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def spread(self) -> float | None:
        """No weight is held twice."""
        return None

    def _send(self, tensor: Tensor, to: int) -> tuple[dist.Work, Tensor]:
        """Begin to send; the tensor must live until that is done."""
        held = tensor.detach().contiguous()
        self.bytes_sent += held.nbytes
        work = dist.isend(held, to)
        assert work is not None
        return work, held

    def _receive(self, shape: tuple[int, ...] | torch.Size, source: int) -> Tensor:
        tensor = torch.empty(shape, device=self.device)
        with self.clock.talking():
            dist.recv(tensor, source)
        return tensor


@torch.no_grad()
def _walk(layers: nn.Sequential, x: Tensor) -> tuple[list[float], list[tuple[int, ...]]]:
    """The multiplications that each layer takes for one sample; the shapes of a sample before each and at the end."""
    costs, shapes = [], [tuple(x.shape[1:])]
    for layer in layers.eval():
        cost = 0.0
        handles = []

        def count(part: nn.Module, _: object, output: object) -> None:
            nonlocal cost
            weight = getattr(part, "weight", None)
            if isinstance(weight, Tensor) and isinstance(output, Tensor):
                cost += weight.numel() * output[0].numel() / max(1, weight.shape[0]) if weight.dim() > 1 else 0.0
                cost += output[0].numel()

        handles = [part.register_forward_hook(count) for part in layer.modules()]
        x = layer(x)
        for handle in handles:
            handle.remove()
        costs.append(cost)
        shapes.append(tuple(x.shape[1:]))
    layers.train()
    return costs, shapes


def balanced(costs: list[float], stages: int) -> list[int]:
    """Where to cut `costs` into so many consecutive stages, none empty, so that the costliest is as cheap as can be.

    balanced([1, 1, 4, 1], 2)      # [2]: 1 + 1 | 4 + 1
    """
    sums = [0.0, *itertools.accumulate(costs)]
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [])}
    for stage in range(1, stages + 1):
        for end in range(stage, len(costs) + 1):
            options = [
                (max(best[stage - 1, cut][0], sums[end] - sums[cut]), [*best[stage - 1, cut][1], cut])
                for cut in range(stage - 1, end)
                if (stage - 1, cut) in best
            ]
            best[stage, end] = min(options)
    return best[stages, len(costs)][1][1:]
