"""The part `schedule`: the chapter's puzzle, a training step of a two-layer perceptron on one CPU and two devices.

The host holds the weights. Each device takes its half of the batch, goes forward and backward, and sends the gradient
of each layer to the host, which sums them, updates the weights and sends them back. Who must wait for whom?

    in_order      one thing after the other: the first device, the second, the host, the weights to one, to the other
    by_hand       both devices at once; the second layer's gradient travels, is summed and comes back as new weights
                  while the first layer's is still being computed
    by_backend    the plain program, and the backend finds what may overlap: DistributedDataParallel between CPU
                  devices' processes (`worker.concurrency.backend`), autograd and streams on GPUs

After every step the weights of every device are compared with those of one process that took the whole batch in
float64; then they, and the gradients in shared memory, are filled with NaN, and the next step begins from the same
weights. Of k devices the first two are used.
"""

from __future__ import annotations

import mmap
import os
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from worker.concurrency.crew import Crew
from worker.concurrency.lanes import Lane, Piece, Sample
from worker.concurrency.part import Assigned, Checked, Part
from worker.concurrency.step import BATCH, DEVICES, LAYERS, RATE, Step, compare, features_of
from worker.measure.rows import twin_of

IN_ORDER = "in_order"
Spans = tuple[int | None, list[tuple[str, float, float]]]
"""Of one device, or of the host: (name, start, end) of each piece, by the machine's clock."""


class Shared:
    """Memory that the host and both devices see: [W1, W2], and [gradient 1, gradient 2] of each device."""

    def __init__(self, step: Step, memory: mmap.mmap) -> None:
        count = (1 + DEVICES) * 2
        every = torch.frombuffer(memory, dtype=step.torch_dtype).view(count, step.features, step.features)
        self.weights = [every[0], every[1]]
        self.gradients = [[every[2 + 2 * rank], every[3 + 2 * rank]] for rank in range(DEVICES)]


class Worker:
    """One CPU device: its weights, its half of the batch, and the pipes by which it and the host wait for each other.

    A pipe carries one byte, the number of the layer whose gradient, or weight, is there.
    """

    def __init__(self, step: Step, memory: mmap.mmap, rank: int, up: int, down: int) -> None:
        self.step, self.rank, self.up, self.down = step, rank, up, down
        self.shared = Shared(step, memory)
        self.x, self.target = (part.chunk(DEVICES)[rank] for part in step.batch())
        self.expected = step.expected()
        self.weights = step.weights()
        self.spans: list[tuple[str, float, float]] = []

    def prepare(self) -> None:
        """Everything is there once this is answered."""

    def run(self) -> list[tuple[str, float, float]]:
        """The whole step by hand: gradients go up as they come, weights come down as they are ready."""
        self.compute()
        self.pull(waits=True)
        return self.spans

    def compute(self, tells: bool = True) -> list[tuple[str, float, float]]:
        """Forward and backward; each gradient is copied to the host's memory as soon as it is there."""
        self.spans = []
        w1, w2 = self.weights
        begun_s = time.perf_counter()
        a = self.x @ w1.T
        h = torch.relu(a)
        error = (h @ w2.T - self.target) * (2 / BATCH)
        self._mark("forward", begun_s)
        begun_s = time.perf_counter()
        gradient = error.T @ h
        self._mark("backward 2", begun_s)
        self._push(2, gradient, tells)
        begun_s = time.perf_counter()
        gradient = ((error @ w2) * (a > 0)).T @ self.x
        self._mark("backward 1", begun_s)
        self._push(1, gradient, tells)
        return self.spans

    def pull(self, waits: bool = False) -> list[tuple[str, float, float]]:
        """Copy the new weights, the second layer's first."""
        if not waits:
            self.spans = []
        for layer in LAYERS:
            if waits:
                got = os.read(self.down, 1)
                assert got == bytes([layer]), got
            begun_s = time.perf_counter()
            self.weights[layer - 1].copy_(self.shared.weights[layer - 1])
            self._mark(f"pull {layer}", begun_s)
        return self.spans

    def verify(self) -> dict[str, Any]:
        """Compare this device's weights with the right ones; then all is as it was before the step."""
        found = compare(self.weights, self.expected, self.step.tolerance)
        for weight, initial in zip(self.weights, self.step.weights(), strict=True):
            weight.copy_(initial)
        for gradient in self.shared.gradients[self.rank]:
            gradient.fill_(torch.nan)
        return found

    def _push(self, layer: int, gradient: Tensor, tells: bool) -> None:
        begun_s = time.perf_counter()
        self.shared.gradients[self.rank][layer - 1].copy_(gradient)
        self._mark(f"push {layer}", begun_s)
        if tells:
            os.write(self.up, bytes([layer]))

    def _mark(self, name: str, begun_s: float) -> None:
        self.spans.append((name, begun_s, time.perf_counter()))


class Host:
    """The CPU of the puzzle: sums gradients, updates weights."""

    def __init__(self, step: Step, memory: mmap.mmap, ups: list[int], downs: list[int]) -> None:
        self.step, self.ups, self.downs = step, ups, downs
        self.shared = Shared(step, memory)
        self.initial = step.weights()

    def prepare(self) -> None:
        """The weights are where the devices will look for them, and no gradient is."""
        self.verify()
        for gradients in self.shared.gradients:
            for gradient in gradients:
                gradient.fill_(torch.nan)

    def run(self, waits: bool = True) -> list[tuple[str, float, float]]:
        """Update each layer; with `waits`, as soon as both gradients are there, and tell both devices."""
        spans = []
        for layer in LAYERS:
            for up in self.ups if waits else []:
                got = os.read(up, 1)
                assert got == bytes([layer]), got
            begun_s = time.perf_counter()
            first, *others = (gradients[layer - 1] for gradients in self.shared.gradients)
            total = sum(others, start=first)
            self.shared.weights[layer - 1].sub_(total, alpha=RATE)
            spans.append((f"update {layer}", begun_s, time.perf_counter()))
            for down in self.downs if waits else []:
                os.write(down, bytes([layer]))
        return spans

    def verify(self) -> None:
        """The weights as they were before the step."""
        for weight, initial in zip(self.shared.weights, self.initial, strict=True):
            weight.copy_(initial)


def on_cpu(crew: Crew, assigned: Assigned, checked: Checked) -> Part:
    """Two devices' processes and the host's; and two more for the backend's way."""
    from worker.concurrency.backend import Backend  # the distributed library, which only this part needs

    spec = assigned.spec
    step = Step(features_of(assigned.size), spec.dtype, spec.seed)
    memory = mmap.mmap(-1, step.shared_bytes)
    ups, downs = ([os.pipe() for _ in range(DEVICES)] for _ in range(2))
    workers, backends = ([f"{name}:{rank}" for rank in range(DEVICES)] for name in ("device", "backend"))
    meeting = str(assigned.folder / "meeting")
    for rank, device in enumerate(assigned.devices[:DEVICES]):
        make = partial(Worker, step, memory, rank, ups[rank][1], downs[rank][0])
        crew.start(workers[rank], make, device.cores, assigned.threads(rank))
        crew.start(backends[rank], partial(Backend, step, rank, meeting), device.cores, assigned.threads(rank))
    host = partial(Host, step, memory, [read for read, _ in ups], [write for _, write in downs])
    cores = tuple(core for device in assigned.devices[:DEVICES] for core in device.cores)
    crew.start("host", host, cores, 1)
    for end in (end for pair in (*ups, *downs) for end in pair):
        os.close(end)
    crew.ask_all(["host", *workers, *backends], "prepare")

    def verify(of: str, names: list[str]) -> None:
        told = [{**found, "where": name} for found, name in zip(crew.ask_all(names, "verify"), names, strict=True)]
        checked.runs("equal_to_whole_batch", of, told, spec.dtype, {})

    def in_order(of: str) -> Sample:
        begun_s = time.perf_counter()
        spans: list[Spans] = [(rank, crew.ask(name, "compute", tells=False)) for rank, name in enumerate(workers)]
        spans.append((None, crew.ask("host", "run", waits=False)))
        spans += [(rank, crew.ask(name, "pull")) for rank, name in enumerate(workers)]
        sample = _sample(begun_s, spans)
        crew.ask("host", "verify")
        verify(of, workers)
        return sample

    def by_hand() -> Sample:
        begun_s = time.perf_counter()
        host_spans, *spans = crew.ask_all(["host", *workers], "run")
        sample = _sample(begun_s, [*enumerate(spans), (None, host_spans)])
        crew.ask("host", "verify")
        verify("by_hand", workers)
        return sample

    def by_backend() -> Sample:
        begun_s = time.perf_counter()
        sample = _sample(begun_s, list(enumerate(crew.ask_all(backends, "run"))))
        verify("by_backend", backends)
        return sample

    part = _part(
        {IN_ORDER: partial(in_order, IN_ORDER), twin_of(IN_ORDER): partial(in_order, twin_of(IN_ORDER))}
        | {"by_hand": by_hand, "by_backend": by_backend},
        checked,
    )
    part.notes.append(
        "schedule: the host's own work (update) runs on the cores of the two devices; by_backend is "
        "DistributedDataParallel over gloo, in which every device updates its own weights and there is no host"
    )
    return part


def on_cuda(crew: Crew, assigned: Assigned, checked: Checked) -> Part:
    """One process, both GPUs and the host's memory."""
    from worker.concurrency.cuda_step import GpuStep

    spec = assigned.spec
    step = Step(features_of(assigned.size), spec.dtype, spec.seed)
    crew.start("gpu step", partial(GpuStep, step), assigned.cores, len(assigned.cores))
    crew.ask("gpu step", "prepare")

    def run(of: str, way: str) -> Sample:
        told = crew.ask("gpu step", "run", way=way)
        checked.runs("equal_to_whole_batch", of, crew.ask("gpu step", "verify"), spec.dtype, {})
        pieces = [
            Piece(name, start, end, {"device": "host"} if rank is None else {"rank": rank})
            for rank, name, start, end in told["spans"]
        ]
        return Sample(told["seconds"], pieces)

    names = (IN_ORDER, twin_of(IN_ORDER), "by_hand", "by_backend")
    return _part({of: partial(run, of, IN_ORDER if IN_ORDER in of else of) for of in names}, checked)


def _part(runs: dict[str, Any], checked: Checked) -> Part:
    at = {"devices": DEVICES}
    lanes = [Lane(name, run, "both", name, at) for name, run in runs.items()]
    return Part("schedule", {}, lanes, IN_ORDER, [("by_hand", IN_ORDER), ("by_backend", IN_ORDER)], checked)


def _sample(begun_s: float, spans: list[Spans]) -> Sample:
    pieces = [
        Piece(name, start - begun_s, end - begun_s, {"device": "host"} if rank is None else {"rank": rank})
        for rank, each in spans
        for name, start, end in each
    ]
    return Sample(max(piece.end_s for piece in pieces), pieces)
