"""`reproduce.py` of a `parallel` job: a plain torch script without Torchstone that repeats run(x) and the copies,
which is of `concurrency` and of `overlap`; `streams` and `schedule` are not in it.

    Path("reproduce.py").write_text(reproduction(spec, threads=1, devices=2, is_cuda=False))

It takes the median of a few rounds where the job raced them, and checks every result as the job did.
"""

from __future__ import annotations

from torchstone.parallel import ParallelSpec

_HEAD = '''"""{title}: what two parts of a Torchstone job of kind "parallel" measure, with torch alone.

It covers `concurrency` (each device alone, one after another, all at once) and `overlap` (copies after computing and
beside it), in five rounds in fixed order, without intervals. It does not cover `streams` and `schedule`, nor
lanes that the two parts have beside these.

python reproduce.py [repeats]
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch

SIZE, REPEATS, DTYPE, SEED = {size}, int(sys.argv[1]) if len(sys.argv) > 1 else {repeats}, torch.{dtype}, {seed}
DEVICES, THREADS, ROUNDS = {devices}, {threads}, 5


def matrix(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, SIZE, generator=generator, dtype=DTYPE) / SIZE**0.25


def check(results, expected):
    for result in results:
        assert float((result - expected).abs().max()) <= 1e-4, "a result was read before it was there"
    results.fill_(torch.nan)

'''

_CPU = '''
import multiprocessing as mp


def device(rank, cores, pipe, shared, heard):
    """One CPU device: products into memory that the copying process sees; a byte for each that is done."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(THREADS)
    x, expected, local = matrix(SEED + rank), None, torch.empty_like(shared)
    expected = x @ x
    while (order := pipe.recv()) is not None:
        if order == "run":
            for i in range(REPEATS):
                torch.mm(x, x, out=shared[i])
                heard.release()
        elif order in ("copy", "receive"):
            for i in range(REPEATS):
                heard.acquire()
                local[i].copy_(shared[i])
        end = time.perf_counter()
        if order == "run":
            pass
        elif order == "check":
            check(shared, expected)
        elif order in ("copy", "receive"):
            own = matrix(SEED)
            check(local, own @ own)
        pipe.send(end)


def main():
    context = mp.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    groups = [set(cores[rank::DEVICES]) or set(cores) for rank in range(DEVICES)]
    shared = [torch.full((REPEATS, SIZE, SIZE), torch.nan, dtype=DTYPE).share_memory_() for _ in groups]
    heard, pipes, processes = [context.Semaphore(0) for _ in groups], [], []

    def start(rank, group, of):
        ours, theirs = context.Pipe()
        process = context.Process(target=device, args=(rank, group, theirs, shared[of], heard[of]), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)

    for rank, group in enumerate(groups):
        start(rank, group, rank)
    start(0, groups[min(1, DEVICES - 1)], 0)  # copies what device 0 computes
    copier = DEVICES

    def order(at_once, *orders):
        begun, ends = time.perf_counter(), []
        if at_once:
            for who, what in orders:
                pipes[who].send(what)
        for who, what in orders:
            if not at_once:
                pipes[who].send(what)
            ends.append(pipes[who].recv())
        return max(ends) - begun

    every = [(rank, "run") for rank in range(DEVICES)]
    ways = {f"device {rank} alone": (True, [(rank, "run")]) for rank in range(DEVICES)}
    ways["one after another"] = (False, every)
    ways["all at once"] = (True, every)
    ways["compute, then copy"] = (False, [(0, "run"), (copier, "receive")])
    ways["copy while computing"] = (True, [(0, "run"), (copier, "receive")])
    seconds = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, (at_once, orders) in ways.items():
            seconds[name].append(order(at_once, *orders))
            used = sorted({who for who, what in orders if what == "run"})
            order(True, *[(who, "check") for who in used])
            for who in used:
                while heard[who].acquire(block=False):
                    pass
    for name in ways:
        print(f"{name:24} {statistics.median(seconds[name][1:]):.4f} s")
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
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
    )
    return head + (_CUDA if is_cuda else _CPU)
