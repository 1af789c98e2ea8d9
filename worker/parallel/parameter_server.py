"""`parameter_server`: every rank pushes its gradients to a server, which updates the weights; every rank pulls them.

The chapter's last section. With `parameter_servers: one` rank 0 serves all weights, and its link carries everything;
with `split` each rank serves a part of them, so that all links carry the same. The servers work too: they compute their
share of the batch like everyone else. What a server's update takes counts as communication: the others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worker.parallel.clock import END, SYNCED
from worker.parallel.optimizers import make_optimizer
from worker.parallel.single import Share, Single


class ParameterServer(Single):
    """One rank of it."""

    def prepare(self) -> None:
        """Say who serves what: the largest weights first, each to the server that has least."""
        servers = self.setting.world_size if self.setting.spec.parameter_servers == "split" else 1
        self.served: list[list[str]] = [[] for _ in range(servers)]
        load = [0] * servers
        for name, p in sorted(self.module.named_parameters(), key=lambda item: -item[1].numel()):
            least = load.index(min(load))
            self.served[least].append(name)
            load[least] += p.numel()

    def restart(self) -> None:
        super().restart()
        mine = [p for name, p in self.module.named_parameters() if name in self._mine()]
        # A rank that serves nothing keeps an optimiser that it never uses: torch has none without parameters.
        self.optimizer = make_optimizer(self.setting.spec.optimizer, mine or self.module.parameters())

    def step(self, batch: Tensor, learning_rate: float) -> Share:
        self.clock.begin()
        share = self.forward_backward(batch)
        self.push()
        if self._mine():
            self.update(learning_rate)
        self.pull()
        self.clock.mark(SYNCED)
        self.clock.mark(END)
        return share

    def push(self) -> None:
        """Sum each server's part of the gradients there."""
        self._move(lambda p: p.grad, dist.reduce)

    @torch.no_grad()
    def pull(self) -> None:
        """Take over each server's part of the weights."""
        self._move(lambda p: p.detach(), dist.broadcast)

    def gradients(self) -> dict[str, Tensor]:
        """Of what this rank serves: nobody else has their sum."""
        return {name: gradient for name, gradient in super().gradients().items() if name in self._mine()}

    def _move(self, part: Callable[[nn.Parameter], Tensor | None], move: Callable[[Tensor, int], object]) -> None:
        """`move` one flat tensor per server, and write back what came of it."""
        parameters = dict(self.module.named_parameters())
        for server, names in enumerate(self.served):
            tensors = [t for name in names if (t := part(parameters[name])) is not None]
            if not tensors:
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            move(flat, server)
            if self.rank != server:
                self.bytes_sent += flat.nbytes if move is dist.reduce else 0
            elif move is dist.broadcast:
                self.bytes_sent += flat.nbytes * (self.setting.world_size - 1)
            for tensor, new in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(new.view_as(tensor))

    def _mine(self) -> list[str]:
        return self.served[self.rank] if self.rank < len(self.served) else []
