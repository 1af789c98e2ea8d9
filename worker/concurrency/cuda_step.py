"""The puzzle's step on two GPUs and the host, in one process.

    step = GpuStep(Step(...)); step.prepare(); step.run("by_hand")

    in_order      every operation is waited for
    by_hand       gradients go to pinned memory on a stream of their own; the host waits for an event of each layer, and
                  no longer: it sums the second layer's while the GPUs are still busy with the first layer's
    by_backend    the plain program: forward on both, `backward` on both (autograd has a thread for each device),
                  `.cpu()`, update, `.to(device)`; what overlaps is what streams and autograd find

Spans of the GPUs are between their events, those of the host by its clock, both from the begin of the step.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from worker.concurrency.cuda import between, event, synchronize
from worker.concurrency.step import BATCH, DEVICES, LAYERS, RATE, Step, compare

_accelerator: Any = torch.accelerator
Spans = list[tuple[int | None, str, Any, Any]]


class GpuStep:
    """Weights on the host and on both devices."""

    def __init__(self, step: Step, kind: str = "cuda") -> None:
        self.step, self.kind = step, kind

    def prepare(self) -> None:
        """Data on the devices, buffers in pinned memory."""
        self.devices = [torch.device(self.kind, rank) for rank in range(DEVICES)]
        x, target = self.step.batch()
        self.x = [part.to(d) for part, d in zip(x.chunk(DEVICES), self.devices, strict=True)]
        self.target = [part.to(d) for part, d in zip(target.chunk(DEVICES), self.devices, strict=True)]
        self.initial, self.expected = self.step.weights(), self.step.expected()
        self.host = [w.clone().pin_memory() for w in self.initial]
        self.weights = [[w.to(d).requires_grad_() for w in self.initial] for d in self.devices]
        self.arrived = [[torch.empty_like(w).pin_memory() for w in self.initial] for _ in self.devices]
        self.side = [torch.Stream(d) for d in self.devices]
        self.verify()

    def run(self, way: str) -> dict[str, Any]:
        """One step: seconds, and spans [rank or null, name, start_s, end_s]."""
        self.spans: Spans = []
        synchronize(DEVICES)
        bases = [event(self.kind, rank) for rank in range(DEVICES)]
        self.begun_s = time.perf_counter()
        {"in_order": self._in_order, "by_hand": self._by_hand, "by_backend": self._by_backend}[way]()
        synchronize(DEVICES)
        seconds = time.perf_counter() - self.begun_s
        spans = [
            [rank, name, start, end]
            if rank is None
            else [rank, name, between(bases[rank], start), between(bases[rank], end)]
            for rank, name, start, end in self.spans
        ]
        return {"seconds": seconds, "spans": spans}

    def verify(self) -> list[dict[str, Any]]:
        """Compare every device's weights; then all is as before the step, and no gradient is anywhere."""
        told = [
            {**compare([w.detach() for w in ws], self.expected, self.step.tolerance), "where": str(device)}
            for ws, device in zip(self.weights, self.devices, strict=True)
        ]
        with torch.no_grad():
            for weights, arrived in zip(self.weights, self.arrived, strict=True):
                for weight, host, initial, gradient in zip(weights, self.host, self.initial, arrived, strict=True):
                    weight.copy_(initial)
                    host.copy_(initial)
                    gradient.fill_(torch.nan)
                    weight.grad = None
        synchronize(DEVICES)
        return told

    def _in_order(self) -> None:
        for rank in range(DEVICES):
            for layer, gradient in self._gradients(rank):
                self._push(rank, layer, gradient)
            _accelerator.synchronize(rank)
        for layer in LAYERS:
            self._update(layer)
        for rank in range(DEVICES):
            for layer in LAYERS:
                self._pull(rank, layer)
            _accelerator.synchronize(rank)

    def _by_hand(self) -> None:
        ready: dict[tuple[int, int], Any] = {}
        kept = []
        under_way = [self._gradients(rank) for rank in range(DEVICES)]
        for layer in LAYERS:
            for rank in range(DEVICES):
                _, gradient = next(under_way[rank])
                kept.append(gradient)  # until the step is over: the other stream reads it
                self.side[rank].wait_stream(_accelerator.current_stream(rank))
                with self.side[rank]:
                    ready[rank, layer] = self._push(rank, layer, gradient)
        for layer in LAYERS:
            for rank in range(DEVICES):
                ready[rank, layer].synchronize()
            self._update(layer)
            for rank in range(DEVICES):
                with self.side[rank]:
                    # The device's own weight must not change while its backward reads it.
                    self.side[rank].wait_stream(_accelerator.current_stream(rank))
                    self._pull(rank, layer)
        for rank in range(DEVICES):
            _accelerator.current_stream(rank).wait_stream(self.side[rank])
        synchronize(DEVICES)
        kept.clear()

    def _by_backend(self) -> None:
        losses = []
        for rank in range(DEVICES):
            start = event(self.kind, rank)
            w1, w2 = self.weights[rank]
            output = torch.relu(self.x[rank] @ w1.T) @ w2.T
            losses.append(((output - self.target[rank]) ** 2).sum() / BATCH)
            self.spans.append((rank, "forward", start, event(self.kind, rank)))
        starts = [event(self.kind, rank) for rank in range(DEVICES)]
        torch.autograd.backward(losses)
        for rank in range(DEVICES):
            self.spans.append((rank, "backward", starts[rank], event(self.kind, rank)))
        for layer in LAYERS:
            begun_s = time.perf_counter()
            gradients = [self._gradient_of(rank, layer).cpu() for rank in range(DEVICES)]
            self.host[layer - 1].sub_(gradients[0] + gradients[1], alpha=RATE)
            self._note_host(f"update {layer}", begun_s)
            for rank in range(DEVICES):
                self._pull(rank, layer)

    def _gradient_of(self, rank: int, layer: int) -> Tensor:
        gradient = self.weights[rank][layer - 1].grad
        assert gradient is not None
        return gradient

    @torch.no_grad()
    def _gradients(self, rank: int) -> Any:
        """Yield (layer, gradient) as they are queued, the second layer's first."""
        w1, w2 = self.weights[rank]
        start = event(self.kind, rank)
        a = self.x[rank] @ w1.T
        h = torch.relu(a)
        error = (h @ w2.T - self.target[rank]) * (2 / BATCH)
        self.spans.append((rank, "forward", start, event(self.kind, rank)))
        start = event(self.kind, rank)
        gradient = error.T @ h
        self.spans.append((rank, "backward 2", start, event(self.kind, rank)))
        yield 2, gradient
        start = event(self.kind, rank)
        gradient = ((error @ w2) * (a > 0)).T @ self.x[rank]
        self.spans.append((rank, "backward 1", start, event(self.kind, rank)))
        yield 1, gradient

    def _push(self, rank: int, layer: int, gradient: Tensor) -> Any:
        start = event(self.kind, rank)
        self.arrived[rank][layer - 1].copy_(gradient, non_blocking=True)
        end = event(self.kind, rank)
        self.spans.append((rank, f"push {layer}", start, end))
        return end

    def _update(self, layer: int) -> None:
        begun_s = time.perf_counter()
        first, second = (arrived[layer - 1] for arrived in self.arrived)
        self.host[layer - 1].sub_(first + second, alpha=RATE)
        self._note_host(f"update {layer}", begun_s)

    def _pull(self, rank: int, layer: int) -> None:
        start = event(self.kind, rank)
        with torch.no_grad():
            self.weights[rank][layer - 1].copy_(self.host[layer - 1], non_blocking=True)
        self.spans.append((rank, f"pull {layer}", start, event(self.kind, rank)))

    def _note_host(self, name: str, begun_s: float) -> None:
        self.spans.append((None, name, begun_s - self.begun_s, time.perf_counter() - self.begun_s))
