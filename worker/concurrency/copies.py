"""The part `overlap`: results are copied to where they are needed while the next ones are computed, or afterwards.

    part = on_cpu(crew, assigned)      # lanes compute, copy, serial, serial_again, overlapped
    part = on_cuda(crew, assigned, "device_to_host")

On CPU devices no copy engine works beside the cores, so `overlap` is null there. What is true of them is measured under
another name, `host_copy_overlap`: one device's process leaves each result in shared memory and tells so through a pipe;
another process, on the next device's cores, copies it into memory of its own. Everything that is copied is compared
with what it should be after every run, and source and target are filled with NaN before the next one.
"""

from __future__ import annotations

import mmap
import os
import time
from functools import partial
from typing import Any

from worker.concurrency.crew import Crew
from worker.concurrency.lanes import Lane, Piece, Sample
from worker.concurrency.part import Assigned, Checked, Part
from worker.concurrency.products import TOLERANCE, Products, buffers, matrix, verified, work_of
from worker.measure.roofline import Work
from worker.measure.rows import twin_of

SERIAL = "serial"
DIRECTIONS = ("device_to_host", "host_to_device")
WHY_NULL = (
    "a CPU device has no engine that copies while its cores compute; copies between the processes of two devices are "
    "measured as host_copy_overlap"
)


class Maker(Products):
    """Computes into shared memory, and can fill it with right results without computing."""

    def refill(self) -> None:
        """Every result as it should be."""
        self.results.copy_(self.expected)


class Copier:
    """Copies results from shared memory into its own; `hear`: gets a byte for each that is there."""

    def __init__(self, source: mmap.mmap, size: int, repeats: int, dtype: str, seed: int, hear: int) -> None:
        import torch

        self.source = buffers(source, repeats, size, getattr(torch, dtype))
        self.target = buffers(None, repeats, size, self.source.dtype).fill_(torch.nan)
        x = matrix(size, self.source.dtype, seed)
        self.expected = x @ x
        self.tolerance = TOLERANCE[dtype]
        self.hear = hear

    def prepare(self) -> None:
        """Everything is there once this is answered."""

    def receive(self) -> list[list[float]]:
        """[start_s, end_s] of each copy, made as soon as its source is told to be there."""
        spans = []
        for i in range(len(self.source)):
            self.wait_for_next()
            spans.append(self._copy(i))
        return spans

    def copy(self) -> list[list[float]]:
        """The same without waiting: all are there."""
        return [self._copy(i) for i in range(len(self.source))]

    def wait_for_next(self) -> None:
        """Until the next result is there."""
        os.read(self.hear, 1)

    def drain(self) -> None:
        """Take what was told and not waited for."""
        for _ in range(len(self.source)):
            self.wait_for_next()

    def verify(self) -> dict[str, Any]:
        """Every copy is compared, then poisoned."""
        return verified(self.target, self.expected, self.tolerance)

    def _copy(self, i: int) -> list[float]:
        start_s = time.perf_counter()
        self.target[i].copy_(self.source[i])
        return [start_s, time.perf_counter()]


def on_cpu(crew: Crew, assigned: Assigned, checked: Checked, copier: type[Copier] = Copier) -> Part:
    """The first device computes; the cores of the second, where there is one, copy."""
    spec, size, repeats = assigned.spec, assigned.size, assigned.repeats
    other = min(1, len(assigned.devices) - 1)
    shared = mmap.mmap(-1, repeats * size * size * (4 if spec.dtype == "float32" else 8))
    hear, tell = os.pipe()
    crew.start(
        "maker",
        lambda: Maker(size, repeats, spec.dtype, spec.seed, shared, tell),
        assigned.devices[0].cores,
        assigned.threads(),
    )
    crew.start(
        "copier",
        lambda: copier(shared, size, repeats, spec.dtype, spec.seed, hear),
        assigned.devices[other].cores,
        assigned.threads(other),
    )
    for end in (hear, tell):
        os.close(end)
    told, _ = crew.ask_all(["maker", "copier"], "prepare")
    checked.right("products", told, TOLERANCE[spec.dtype])

    def compute() -> Sample:
        begun_s = time.perf_counter()
        sample = _sample(begun_s, {"compute": crew.ask("maker", "run")})
        crew.ask("copier", "drain")
        checked.runs("computed_whole", "products", [crew.ask("maker", "verify")], spec.dtype, {})
        return sample

    def copy() -> Sample:
        crew.ask("maker", "refill")
        begun_s = time.perf_counter()
        sample = _sample(begun_s, {"copy": crew.ask("copier", "copy")})
        check("shared_memory")
        return sample

    def serial(of: str) -> Sample:
        begun_s = time.perf_counter()
        made = crew.ask("maker", "run")
        sample = _sample(begun_s, {"compute": made, "copy": crew.ask("copier", "receive")})
        check(of)
        return sample

    def overlapped() -> Sample:
        begun_s = time.perf_counter()
        made, copied = crew.ask_each([("maker", "run", {}), ("copier", "receive", {})])
        sample = _sample(begun_s, {"compute": made, "copy": copied})
        check("overlapped")
        return sample

    def check(of: str) -> None:
        """The copies first: they were read from results that must be whole too."""
        checked.runs("copied_whole", of, [crew.ask("copier", "verify")], spec.dtype, {})
        checked.runs("computed_whole", of, [crew.ask("maker", "verify")], spec.dtype, {})

    again = twin_of(SERIAL)
    work = _work_of(assigned)
    lanes = [
        Lane("compute", compute, "compute", "products", work=work["compute"]),
        Lane("copy", copy, "copy", "shared_memory", work=work["copy"], ranks=(other,)),
        Lane(SERIAL, partial(serial, SERIAL), "both", SERIAL, work=work["both"]),
        Lane(again, partial(serial, again), "both", again, work=work["both"]),
        Lane("overlapped", overlapped, "both", "overlapped", work=work["both"]),
    ]
    part = Part("overlap", {}, lanes, SERIAL, [("overlapped", SERIAL)], checked)
    if set(assigned.devices[0].cores) == set(assigned.devices[other].cores):
        part.notes.append(
            f"host_copy_overlap: with one device, the copying process shares {assigned.devices[0].name}'s cores with "
            "the computing one"
        )
    return part


def on_cuda(crew: Crew, assigned: Assigned, checked: Checked, direction: str) -> Part:
    """Everything on the first GPU; see `worker.concurrency.cuda.GpuCopies`."""
    from worker.concurrency.cuda import GpuCopies

    spec, at, work = assigned.spec, {"direction": direction}, _work_of(assigned)
    name = f"gpu {direction}"
    make = partial(GpuCopies, assigned.size, assigned.repeats, spec.dtype, spec.seed, direction)
    crew.start(name, make, assigned.devices[0].cores, len(assigned.devices[0].cores))
    checked.right("products", crew.ask(name, "prepare"), TOLERANCE[spec.dtype])

    def lane(key: str, timing: str, of: str, how: str) -> Lane:
        def run() -> Sample:
            told = crew.ask(name, "run", what=timing, how=how)
            for row, found in crew.ask(name, "verify", what=timing).items():
                checked.runs(row, of, [found], spec.dtype, at)
            pieces = [Piece(kind, start, end) for kind, start, end in told["spans"]]
            return Sample(told["seconds"], pieces)

        return Lane(key, run, timing, of, at, work=work[timing])

    again = twin_of(SERIAL)
    lanes = [lane("compute", "compute", "products", SERIAL)]
    lanes += [lane(f"copy/{how}", "copy", how, how) for how in ("pageable", "pinned")]
    lanes += [lane(key, "both", key, SERIAL) for key in (SERIAL, again)]
    lanes += [lane(how, "both", how, how) for how in ("pageable", "pinned")]
    return Part("overlap", at, lanes, SERIAL, [("pageable", SERIAL), ("pinned", SERIAL)], checked)


Spans = list[list[float]]


def _work_of(assigned: Assigned) -> dict[str, Work]:
    """By what a lane times."""
    count = assigned.repeats
    each = {"compute": (count, 0), "copy": (0, count), "both": (count, count)}
    return {timing: work_of(assigned.size, assigned.spec.dtype, *counts) for timing, counts in each.items()}


def _sample(begun_s: float, spans: dict[str, Spans]) -> Sample:
    pieces = [Piece(name, start - begun_s, end - begun_s) for name, each in spans.items() for start, end in each]
    return Sample(max(piece.end_s for piece in pieces), pieces)
