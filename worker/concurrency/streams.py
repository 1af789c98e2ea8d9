"""The part `streams`: products that do not depend on one another, on one device, in one stream or in several.

    runner = StreamRunner(Work(size=1000, dtype="float32", seed=0, streams=4), "one_stream")
    runner.calls["small"]()           # 64 products of 64 x 64;  "large": 4 of size x size

Small work leaves most of a GPU idle, so several streams can fill it; large work fills it alone, and several streams
gain nothing. A CPU device has no streams: what is compared there is one thread after another with all of the device's
cores (`one_stream`), Python threads with one core each (`threads`), and `torch.jit.fork` inside a script (`fork`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.concurrency.crew import Crew
from worker.concurrency.lanes import Lane, Sample
from worker.concurrency.part import Assigned, Checked, Part
from worker.concurrency.products import TOLERANCE, matrix, summed_up, work_of
from worker.contestants.torchscript import on_purpose
from worker.measure.rows import twin_of
from worker.measure.stopwatch import Stopwatch, nothing_to_wait_for

ONE = "one_stream"
SMALL_SIZE, SMALL_COUNT = 64, 64
LARGE_COUNT = 4
_accelerator: Any = torch.accelerator


@dataclass(frozen=True)
class Work:
    """Independent products of two sizes on one device."""

    size: int
    dtype: str
    seed: int
    streams: int
    kind: str = "cpu"

    def inputs(self, which: str) -> list[Tensor]:
        """Matrices to multiply with themselves, all different."""
        size, count = (SMALL_SIZE, SMALL_COUNT) if which == "small" else (self.size, LARGE_COUNT)
        dtype = getattr(torch, self.dtype)
        device = "cpu" if self.kind == "cpu" else f"{self.kind}:0"
        return [matrix(size, dtype, self.seed + i, device) for i in range(count)]


class StreamRunner(Stopwatch):
    """One way of doing the work, in a process of its own; keys are `small` and `large`."""

    def __init__(self, work: Work, way: str) -> None:
        on_device = work.kind != "cpu"
        super().__init__(_synchronize if on_device else nothing_to_wait_for)
        self.work, self.way = work, way
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        self.expected: dict[str, list[Tensor]] = {}

    def prepare(self) -> None:
        """Inputs, what is right for them, and the call."""
        if self.way == "fork":
            torch.set_num_interop_threads(self.work.streams)
        elif self.way == "threads":
            self.pool = ThreadPoolExecutor(self.work.streams, initializer=_one_thread)
        elif self.way == "streams":
            self.side = [torch.Stream(torch.device(self.work.kind, 0)) for _ in range(self.work.streams)]
        ways = {ONE: self._one, "threads": self._threads, "fork": self._fork, "streams": self._streams}
        forked = _scripted() if self.way == "fork" else None
        self.forked: Any = forked
        for which in ("small", "large"):
            inputs = self.work.inputs(which)
            self.inputs[which], self.expected[which] = inputs, [x @ x for x in inputs]
            self.outputs[which] = [torch.full_like(x, torch.nan) for x in inputs]
            self.calls[which] = lambda way=ways[self.way], which=which: way(which)  # type: ignore[misc]

    def verify(self, key: str) -> dict[str, Any]:
        """Compare every product of the last call with one made alone; then poison all."""
        self.synchronize()
        both = zip(self.outputs[key], self.expected[key], strict=True)
        errors = [float((output - expected).abs().max()) for output, expected in both]
        for output in self.outputs[key]:
            output.fill_(torch.nan)
        self.synchronize()
        return {**summed_up(errors, TOLERANCE[self.work.dtype]), "where": key}

    def _share(self, which: str, first: int, step: int) -> None:
        inputs, outputs = self.inputs[which], self.outputs[which]
        for i in range(first, len(inputs), step):
            torch.mm(inputs[i], inputs[i], out=outputs[i])

    def _one(self, which: str) -> None:
        self._share(which, 0, 1)

    def _threads(self, which: str) -> None:
        list(self.pool.map(lambda first: self._share(which, first, self.work.streams), range(self.work.streams)))

    def _fork(self, which: str) -> None:
        self.forked(self.inputs[which], self.outputs[which], self.work.streams)

    def _streams(self, which: str) -> None:
        own = _accelerator.current_stream(0)
        for first, stream in enumerate(self.side):
            stream.wait_stream(own)
            with stream:
                self._share(which, first, len(self.side))
        for stream in self.side:
            own.wait_stream(stream)


def _share_of(inputs: list[Tensor], outputs: list[Tensor], first: int, step: int) -> int:
    for i in range(first, len(inputs), step):
        torch.mm(inputs[i], inputs[i], out=outputs[i])
    return 0


def _forked(inputs: list[Tensor], outputs: list[Tensor], lanes: int) -> int:
    futures = [torch.jit.fork(_share_of, inputs, outputs, first, lanes) for first in range(1, lanes)]  # type: ignore[no-untyped-call]
    done = _share_of(inputs, outputs, 0, lanes)
    for future in futures:
        done += torch.jit.wait(future)  # type: ignore[no-untyped-call]
    return done


def _scripted() -> Any:
    """As TorchScript: only inside a script a fork is asynchronous."""
    with on_purpose():
        return torch.jit.script(_forked)


def _one_thread() -> None:
    torch.set_num_threads(1)


def _synchronize() -> None:
    _accelerator.synchronize(0)


def parts(crew: Crew, assigned: Assigned, checked: Checked) -> list[Part]:
    """A part for each kind of work; every way has a process of its own on the first device."""
    spec, device = assigned.spec, assigned.devices[0]
    threads = assigned.threads()
    count = spec.streams if assigned.is_cuda else min(spec.streams, max(2, threads))
    ways = [ONE, twin_of(ONE), *(["streams"] if assigned.is_cuda else ["threads", "fork"])]
    work = Work(assigned.size, spec.dtype, spec.seed, count, "cuda" if assigned.is_cuda else "cpu")
    for way in ways:
        base = ONE if way == twin_of(ONE) else way
        # As many threads in all ways: of one operation, or one for each of the operations that run at once.
        intra = threads if base in (ONE, "streams") else 1
        crew.start(way, lambda base=base: StreamRunner(work, base), device.cores, intra)  # type: ignore[misc]
        crew.ask(way, "prepare")
    found = []
    for which in ("small", "large"):
        size, products = (SMALL_SIZE, SMALL_COUNT) if which == "small" else (assigned.size, LARGE_COUNT)
        at = {"work": which, "size": size, "products": products}
        lanes = [
            _lane(crew, way, which, at | {"streams": 1 if ONE in way else count}, checked, spec.dtype) for way in ways
        ]
        part = Part("streams", {"work": which}, lanes, ONE, [(way, ONE) for way in ways[2:]], checked)
        found.append(part)
    if not assigned.is_cuda:
        found[0].notes.append(
            f"streams: a CPU device has none; threads and fork are {count} threads of one core each on "
            f"{device.name}, which has {len(device.cores)}"
        )
    return found


def _lane(crew: Crew, way: str, which: str, at: dict[str, Any], checked: Checked, dtype: str) -> Lane:
    def run() -> Sample:
        # The lane itself lets a short call settle; a call of a second would be left alone.
        seconds, _ = crew.ask(way, "turn", key=which, calls=1, settle_s=0.0, call_s=1.0)
        checked.runs("computed_whole", way, [crew.ask(way, "verify", key=which)], dtype, at)
        return Sample(seconds, [])

    return Lane(way, run, "compute", way, at, work=work_of(at["size"], dtype, at["products"]))
