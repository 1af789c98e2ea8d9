"""The ways of running a graph of branches: one after the other, or at once by what the backend has for it.

Every form computes the same sum, in the same order: the chapter's graph (two matrices of ones, then x * y + 2), or so
many branches, each a chain of `steps` products. `independent` branches start from what is given; in a `dependent` graph
each starts from the result of the one before, so nothing can overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from worker.contestants.torchscript import on_purpose

_jit: Any = torch.jit
_cuda: Any = torch.cuda
"""Neither carries types of its own."""


@dataclass(frozen=True)
class Branches:
    """A graph: E (n, n) of `worker.asynchrony.chain`, and an x (n, n) for every branch: `steps` products by E each."""

    shift: Tensor
    xs: list[Tensor]
    steps: int
    dependent: bool


Run = Callable[[Branches], Tensor]
Small = Callable[[], Tensor]


# What TorchScript compiles: its language, so with its types and without closures -------------------------------


def _branch(shift: Tensor, x: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        x = torch.mm(shift, x)
    return x


def _scripted(shift: Tensor, xs: list[Tensor], steps: int, dependent: bool) -> Tensor:
    total = torch.zeros_like(shift)
    last = torch.zeros_like(shift)
    for x in xs:
        last = _branch(shift, x + last if dependent else x, steps)
        total = total + last
    return total


def _forked(shift: Tensor, xs: list[Tensor], steps: int, dependent: bool) -> Tensor:
    total = torch.zeros_like(shift)
    if dependent:
        last = torch.zeros_like(shift)
        for x in xs:
            last = _jit.wait(_jit.fork(_branch, shift, x + last, steps))
            total = total + last
        return total
    futures = [_jit.fork(_branch, shift, x, steps) for x in xs]
    for future in futures:
        total = total + _jit.wait(future)
    return total


def _ones(columns: int) -> Tensor:
    return torch.ones((1, columns))


def _small_scripted() -> Tensor:
    x = torch.ones((1, 2))
    y = torch.ones((1, 2))
    return x * y + 2


def _small_forked() -> Tensor:
    x = _jit.fork(_ones, 2)  # forking two functions without an argument is more than TorchScript can compile
    y = _jit.fork(_ones, 2)
    z: Tensor = _jit.wait(x) * _jit.wait(y) + 2
    return z


# The forms ------------------------------------------------------------------------------------------------------


def eager() -> tuple[Run, Small]:
    """Operation after operation, by Python."""

    def small() -> Tensor:
        x = torch.ones((1, 2))
        y = torch.ones((1, 2))
        return x * y + 2

    return one_after_the_other, small


def one_after_the_other(graph: Branches) -> Tensor:
    """All branches on the calling thread, or the current stream."""
    total, last = torch.zeros_like(graph.shift), torch.zeros_like(graph.shift)
    for x in graph.xs:
        last = _branch(graph.shift, x + last if graph.dependent else x, graph.steps)
        total = total + last
    return total


def script() -> tuple[Run, Small]:
    """The same as one TorchScript program."""
    with on_purpose():
        program, small = _jit.script(_scripted), _jit.script(_small_scripted)
    return (lambda graph: program(graph.shift, graph.xs, graph.steps, graph.dependent)), small


def jit_fork(threads: int) -> tuple[Run, Small]:
    """A TorchScript program that forks every branch onto the inter-op threads and waits for them."""
    torch.set_num_interop_threads(threads)
    with on_purpose():
        program, small = _jit.script(_forked), _jit.script(_small_forked)
    return (lambda graph: program(graph.shift, graph.xs, graph.steps, graph.dependent)), small


def python_threads(threads: int) -> tuple[Run, Small]:
    """Every branch on a thread of a pool: torch lets go of the interpreter while it computes."""
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def branch(graph: Branches, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return _branch(graph.shift, x, graph.steps)

    def ones() -> Tensor:
        with torch.inference_mode():
            return torch.ones((1, 2))

    def run(graph: Branches) -> Tensor:
        total = torch.zeros_like(graph.shift)
        if graph.dependent:
            last = torch.zeros_like(graph.shift)
            for x in graph.xs:
                last = pool.submit(branch, graph, x + last).result()
                total = total + last
            return total
        for future in [pool.submit(branch, graph, x) for x in graph.xs]:
            total = total + future.result()
        return total

    def small() -> Tensor:
        x, y = pool.submit(ones), pool.submit(ones)
        return x.result() * y.result() + 2

    return run, small


# On CUDA devices ------------------------------------------------------------------------------------------------


def cuda_eager(device: torch.device) -> tuple[Run, Small]:
    """Operation after operation, all queued on one stream."""

    def small() -> Tensor:
        x = torch.ones((1, 2), device=device)
        y = torch.ones((1, 2), device=device)
        return x * y + 2

    return one_after_the_other, small


def streams(device: torch.device, count: int) -> tuple[Run, Small]:
    """Every branch on a side stream, joined by the current one.

    Side streams do not wait for it by themselves (`wait_stream`), nor does the allocator know of them
    (`record_stream`).
    """
    sides = [_cuda.Stream(device) for _ in range(count)]

    def on_sides(work: list[Callable[[], Tensor]]) -> list[Tensor]:
        main = _cuda.current_stream(device)
        results = []
        for index, task in enumerate(work):
            side = sides[index % count]
            side.wait_stream(main)
            with _cuda.stream(side):
                results.append(task())
        for side in sides:
            main.wait_stream(side)
        for result in results:
            result.record_stream(main)
        return results

    def run(graph: Branches) -> Tensor:
        total, last = torch.zeros_like(graph.shift), torch.zeros_like(graph.shift)
        if graph.dependent:
            for x in graph.xs:
                start = x + last
                (last,) = on_sides([partial(_branch, graph.shift, start, graph.steps)])
                total = total + last
            return total
        tasks: list[Callable[[], Tensor]] = [partial(_branch, graph.shift, x, graph.steps) for x in graph.xs]
        for result in on_sides(tasks):
            total = total + result
        return total

    def small() -> Tensor:
        x, y = on_sides([lambda: torch.ones((1, 2), device=device)] * 2)
        return x * y + 2

    return run, small


def cuda_graph(device: torch.device, count: int) -> tuple[Run, Small]:
    """The streams' work, recorded once per graph and replayed as a whole: no dispatch of single operations."""
    run, small = streams(device, count)
    recorded: dict[int, tuple[Any, Tensor]] = {}

    def replay(key: int, work: Callable[[], Tensor]) -> Tensor:
        if key not in recorded:
            side = _cuda.Stream(device)
            side.wait_stream(_cuda.current_stream(device))
            with _cuda.stream(side):
                work()  # libraries set themselves up before anything is recorded
            _cuda.current_stream(device).wait_stream(side)
            graph = _cuda.CUDAGraph()
            with _cuda.graph(graph):
                result = work()
            recorded[key] = graph, result
        graph, result = recorded[key]
        graph.replay()
        return result

    return (lambda graph: replay(id(graph), lambda: run(graph))), (lambda: replay(0, small))
