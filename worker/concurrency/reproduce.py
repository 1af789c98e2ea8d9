"""`reproduce.py` of a `parallel` job: a plain torch script without Torchstone that repeats its parts.

On CPU devices it has all parts that the job asked for, on GPUs run(x) and the copies: `concurrency` and `overlap`.

    Path("reproduce.py").write_text(reproduction(spec, threads=1, devices=2, is_cuda=False))

It takes the median of a few rounds where the job raced them, and checks every result as the job did.
"""

from __future__ import annotations

from torchstone.parallel import ParallelSpec
from worker.concurrency import reproduce_cpu
from worker.concurrency.products import TOLERANCE

_ON_CPUS = """\
The parts that the job asked for. concurrency: each device alone, one after another, all at once. overlap: copies after
computing and beside it. streams: small and large products, one at a time and several. schedule: a training step in
order, by hand, and by DistributedDataParallel. It has no two_streams, and no products or copies alone."""
_ON_GPUS = """\
It covers concurrency (each device alone, one after another, all at once) and overlap (copies after computing and beside
it), but not streams and schedule, nor lanes that the two parts have beside these."""

_HEAD = '''"""{title}: what a Torchstone job of kind "parallel" measures, with torch alone.

{covered}
Each way is run in five rounds in fixed order, without intervals; every result is checked.

python reproduce.py [repeats]
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch

SIZE, REPEATS, DTYPE, SEED = {size}, int(sys.argv[1]) if len(sys.argv) > 1 else {repeats}, torch.{dtype}, {seed}
DEVICES, THREADS, STREAMS, ROUNDS = {devices}, {threads}, {streams}, 5
PARTS, ATOL = {parts}, {atol}


def matrix(seed, size=SIZE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, size, generator=generator, dtype=DTYPE) / size**0.25


def check(results, expected):
    for result in results:
        assert float((result - expected).abs().max()) <= ATOL, "a result was read before it was there"
    results.fill_(torch.nan)

'''

_CUDA = """
def synchronize():
    for rank in range(DEVICES):
        torch.cuda.synchronize(rank)


def main():
    x = [matrix(SEED + rank).to(f"cuda:{rank}") for rank in range(DEVICES)]
    results = [torch.full((REPEATS, SIZE, SIZE), torch.nan, dtype=DTYPE, device=y.device) for y in x]
    expected = [y @ y for y in x]
    pageable = torch.full((REPEATS, SIZE, SIZE), torch.nan, dtype=DTYPE)
    pinned, side = torch.empty_like(pageable).pin_memory(), torch.cuda.Stream(0)

    def run(rank):
        for i in range(REPEATS):
            torch.mm(x[rank], x[rank], out=results[rank][i])

    def one_after_another():
        for rank in range(DEVICES):
            run(rank)
            torch.cuda.synchronize(rank)

    def all_at_once():
        for rank in range(DEVICES):
            run(rank)

    def serial():
        run(0)
        torch.cuda.synchronize(0)
        for i in range(REPEATS):
            pageable[i].copy_(results[0][i])

    def non_blocking_pageable():
        run(0)
        for i in range(REPEATS):
            pageable[i].copy_(results[0][i], non_blocking=True)

    def pinned_on_a_side_stream():
        side.wait_stream(torch.cuda.current_stream(0))
        for i in range(REPEATS):
            torch.mm(x[0], x[0], out=results[0][i])
            ready = torch.cuda.current_stream(0).record_event()
            with torch.cuda.stream(side):
                side.wait_event(ready)
                pinned[i].copy_(results[0][i], non_blocking=True)

    ways = {f"device {rank} alone": (lambda rank=rank: run(rank), None) for rank in range(DEVICES)}
    ways |= {"one after another": (one_after_another, None), "all at once": (all_at_once, None)}
    ways |= {"compute, then copy": (serial, pageable), "non_blocking, pageable": (non_blocking_pageable, pageable)}
    ways |= {"pinned, on a side stream": (pinned_on_a_side_stream, pinned)}
    seconds = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, (way, copied) in ways.items():
            synchronize()
            begun = time.perf_counter()
            way()
            synchronize()
            seconds[name].append(time.perf_counter() - begun)
            if copied is not None:
                check(copied, expected[0].cpu())
            for rank in range(DEVICES):
                if not torch.isnan(results[rank]).all():
                    check(results[rank], expected[rank])
    for name in ways:
        print(f"{name:24} {statistics.median(seconds[name][1:]):.4f} s")


if __name__ == "__main__":
    main()
"""


def reproduction(spec: ParallelSpec, threads: int, devices: int, is_cuda: bool) -> str:
    """The script's text."""
    head = _HEAD.format(
        title=(spec.name or "Parallel work").replace("\\", "").replace('"', "'"),
        size=spec.size,
        repeats=spec.repeats,
        dtype=spec.dtype,
        seed=spec.seed,
        devices=devices,
        threads=threads,
        streams=spec.streams,
        parts=[part.value for part in spec.parts],
        atol=TOLERANCE[spec.dtype],
        covered=_ON_GPUS if is_cuda else _ON_CPUS,
    )
    return head + (_CUDA if is_cuda else reproduce_cpu.TEXT)
