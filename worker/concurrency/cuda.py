"""The same work on GPUs: one process for all of them, which only queues, and waits for every device that has work.

    gpus = GpuProducts(size=4000, repeats=50, dtype="float32", seed=0, count=2)
    gpus.run(ranks=[0, 1], at_once=True, streams=1)         # {"seconds": ..., "spans": [[rank, start_s, end_s], ...]}

    copies = GpuCopies(4000, 50, "float32", 0, "device_to_host")
    copies.run(what="both", how="pinned")                    # copies on a stream of their own, behind the products

Written for `torch.accelerator`, so that a device other than CUDA can stand in. Seconds are the host's, between a
synchronisation of every device and the next one; spans are between events of each device, from its own first event.

A `non_blocking` copy into pageable memory is no asynchronous one: the driver stages it, and to the host it waits. Only
with pinned memory that was allocated before, on a stream of its own, with an event for each result, copies hide behind
products; the copy stream waits for the event, so nothing is read before it is there.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from worker.concurrency.products import TOLERANCE, against_float64, buffers, matrix, verified

_accelerator: Any = torch.accelerator
_KIND = "cuda"


class GpuProducts:
    """run(x) on any of `count` GPUs."""

    def __init__(self, size: int, repeats: int, dtype: str, seed: int, count: int, kind: str = _KIND) -> None:
        self.kind, self.count, self.repeats = kind, count, repeats
        self.tolerance = TOLERANCE[dtype]
        self.size, self.dtype, self.seed = size, getattr(torch, dtype), seed

    def prepare(self) -> list[dict[str, Any]]:
        """How far each device's product is from float64."""
        devices = [torch.device(self.kind, rank) for rank in range(self.count)]
        hosts = [matrix(self.size, self.dtype, self.seed + rank) for rank in range(self.count)]
        self.x = [host.to(device) for host, device in zip(hosts, devices, strict=True)]
        self.results = [
            torch.full((self.repeats, self.size, self.size), torch.nan, dtype=self.dtype, device=device)
            for device in devices
        ]
        self.expected = [x @ x for x in self.x]
        self.streams = [[torch.Stream(device) for _ in range(2)] for device in devices]
        return [against_float64(host, e.cpu()) for host, e in zip(hosts, self.expected, strict=True)]

    def run(self, ranks: list[int], at_once: bool, streams: int) -> dict[str, Any]:
        """`streams` of each device share its products; not `at_once`: a device is waited for before the next begins."""
        synchronize(self.count)
        bases = {rank: event(self.kind, rank) for rank in ranks}
        marks: dict[int, list[tuple[Any, Any]]] = {}
        begun_s = time.perf_counter()
        for rank in ranks:
            marks[rank] = self._queue(rank, streams)
            if not at_once:
                _accelerator.synchronize(rank)
        synchronize(self.count)
        seconds = time.perf_counter() - begun_s
        spans = [
            [rank, between(bases[rank], start), between(bases[rank], end)]
            for rank in ranks
            for start, end in marks[rank]
        ]
        return {"seconds": seconds, "spans": spans}

    def verify(self, ranks: list[int]) -> list[dict[str, Any]]:
        """Compare every result of these devices, then poison it."""
        found = [verified(self.results[rank], self.expected[rank], self.tolerance) for rank in ranks]
        synchronize(self.count)
        return [{**told, "where": f"{self.kind}:{rank}"} for told, rank in zip(found, ranks, strict=True)]

    def _queue(self, rank: int, streams: int) -> list[tuple[Any, Any]]:
        """The events around what each stream was given."""
        own = _accelerator.current_stream(rank)
        used = [own] if streams == 1 else self.streams[rank][:streams]
        marks = []
        with _accelerator.device_index(rank):
            for first, stream in enumerate(used):
                if stream is not own:
                    stream.wait_stream(own)
                with ExitStack() as on_stream:
                    if stream is not own:
                        on_stream.enter_context(stream)
                    start = event(self.kind, rank, stream)
                    for i in range(first, self.repeats, len(used)):
                        torch.mm(self.x[rank], self.x[rank], out=self.results[rank][i])
                    marks.append((start, event(self.kind, rank, stream)))
                if stream is not own:
                    own.wait_stream(stream)
        return marks


class GpuCopies:
    """Products on one GPU, and copies of results to the host, or of what is multiplied to the device.

    To the device, product i needs copy i: it multiplies what arrived. To the host, copy i needs product i.
    """

    def __init__(self, size: int, repeats: int, dtype: str, seed: int, direction: str, kind: str = _KIND) -> None:
        self.to_host, self.kind, self.repeats = direction == "device_to_host", kind, repeats
        self.tolerance = TOLERANCE[dtype]
        self.size, self.dtype, self.seed = size, getattr(torch, dtype), seed

    def prepare(self) -> dict[str, Any]:
        """Buffers of the host, pageable and pinned, and of the device; how far a product is from float64."""
        device = torch.device(self.kind, 0)
        host = matrix(self.size, self.dtype, self.seed)
        self.x = host.to(device)
        self.expected = self.x @ self.x
        shape = (self.repeats, self.size, self.size)
        self.pageable = buffers(None, self.repeats, self.size, self.dtype).fill_(torch.nan)
        self.pinned = torch.empty(shape, dtype=self.dtype, pin_memory=True).fill_(torch.nan)
        self.results = torch.full(shape, torch.nan, dtype=self.dtype, device=device)
        self.side = torch.Stream(device)
        if self.to_host:
            self.arrived = self.results
        else:
            self.arrived = torch.full(shape, torch.nan, dtype=self.dtype, device=device)
            self.pageable.copy_(host)
            self.pinned.copy_(host)
        self.right = self.expected.cpu() if self.to_host else self.x
        return against_float64(host, self.expected.cpu())

    def run(self, what: str, how: str) -> dict[str, Any]:
        """`what`: compute, copy or both; `how`: serial, pageable or pinned."""
        if what == "copy" and self.to_host:
            self.results.copy_(self.expected)
        if what == "compute" and not self.to_host:
            self.arrived.copy_(self.x)
        self.used = self.pinned if how == "pinned" else self.pageable
        self.spans: list[tuple[str, Any, Any]] = []
        synchronize(1)
        base = event(self.kind, 0)
        begun_s = time.perf_counter()
        if what == "compute":
            self._products()
        elif what == "copy":
            self._copies(how)
        else:
            self._both(how)
        synchronize(1)
        seconds = time.perf_counter() - begun_s
        return {
            "seconds": seconds,
            "spans": [[name, between(base, start), between(base, end)] for name, start, end in self.spans],
        }

    def verify(self, what: str) -> dict[str, dict[str, Any]]:
        """Compare everything that was copied and computed, then poison it."""
        found = {}
        if what != "compute":
            target = self.used if self.to_host else self.arrived
            found["copied_whole"] = verified(target, self.right, self.tolerance)
        if what != "copy":
            found["computed_whole"] = verified(self.results, self.expected, self.tolerance)
        for buffer in (self.results, self.arrived):
            buffer.fill_(torch.nan)
        synchronize(1)
        return found

    def _both(self, how: str) -> None:
        if how == "pinned":
            self._overlapped()
        elif self.to_host:
            self._products()
            if how == "serial":
                synchronize(1)
            self._copies(how)
        else:
            self._copies(how)
            if how == "serial":
                synchronize(1)
            self._products()

    def _overlapped(self) -> None:
        """Two streams, tied together by an event for each result."""
        own = _accelerator.current_stream(0)
        self.side.wait_stream(own)
        for i in range(self.repeats):
            if self.to_host:
                self._product(i)
                ready = event(self.kind, 0)
                with self.side:
                    self.side.wait_event(ready)
                    self._copy(i, non_blocking=True)
            else:
                with self.side:
                    self._copy(i, non_blocking=True)
                    ready = event(self.kind, 0, self.side)
                own.wait_event(ready)
                self._product(i)
        own.wait_stream(self.side)

    def _products(self) -> None:
        for i in range(self.repeats):
            self._product(i)

    def _copies(self, how: str) -> None:
        """`serial` and `pageable` on the products' own stream; `pinned` on the other."""
        with ExitStack() as on_stream:
            if how == "pinned":
                self.side.wait_stream(_accelerator.current_stream(0))
                on_stream.enter_context(self.side)
            for i in range(self.repeats):
                self._copy(i, non_blocking=how != "serial")

    def _product(self, i: int) -> None:
        start = event(self.kind, 0)
        torch.mm(self.x if self.to_host else self.arrived[i], self.x, out=self.results[i])
        self.spans.append(("compute", start, event(self.kind, 0)))

    def _copy(self, i: int, non_blocking: bool) -> None:
        source, target = (self.results, self.used) if self.to_host else (self.used, self.arrived)
        start = event(self.kind, 0)
        target[i].copy_(source[i], non_blocking=non_blocking)
        self.spans.append(("copy", start, event(self.kind, 0)))


def synchronize(count: int) -> None:
    """Wait for every one of the first `count` devices, not only for the current one."""
    for rank in range(count):
        _accelerator.synchronize(rank)


def event(kind: str, rank: int, stream: Any = None) -> Any:
    """An event recorded now, on the stream that is current on that device unless another is named."""
    made = torch.Event(torch.device(kind, rank), enable_timing=True)
    made.record(stream if stream is not None else _accelerator.current_stream(rank))
    return made


def between(start: Any, end: Any) -> float:
    """Seconds from one event to another of the same device."""
    return float(start.elapsed_time(end)) * 1e-3
