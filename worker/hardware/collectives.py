"""Probe `collectives`: all-reduce, reduce-scatter and all-gather between the job's devices, by message size.

Gloo between CPU devices, NCCL between GPUs: a process per device, pinned to its cores. Figures `OPERATION_algbw` and
`OPERATION_busbw` at each size, `OPERATION_latency` at the smallest, and the curves of both over the size. As nccl-tests
defines them (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), with n ranks and t the time of the slowest:

    algbw = S / t        busbw = algbw * 2 (n - 1) / n for all-reduce, algbw * (n - 1) / n for the other two

where S is the bytes of the whole message: what each rank holds before reduce-scatter and after all-gather. Timed in
blocks of operations back to back, on zeros, so that sums summed again stay what they are; checked before, in the same
memory, with numbers whose sums are exact in float32.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchstone.fitness import ONE_DEVICE
from worker.hardware.pair import ask_all, closing, time_runs
from worker.hardware.probe import ProbeBench, ProbeReport
from worker.measure.contestant import Contestant, ContestantFailed, Unavailable
from worker.measure.statistics import FEWEST_ROUNDS

BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
}
SIZES_BYTES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 24, 1 << 26)
_ITEM_BYTES = 4
_WITHIN_S = 30.0
_RUN_S = 20e-3
_SETTLE_BELOW_S = 20e-3
"""Where one takes less, one that is not timed goes before each block: the ranks have slept since the last."""
_MOST_PARTS = 3
"""A size that would take so many times its share of the time is left out."""
_LEAST_SHARE = 0.5
"""Of an even share of the time: what a size gets however late it is."""
_PERIOD = 251


def run(bench: ProbeBench) -> ProbeReport:
    """Measure them."""
    report = ProbeReport("collectives")
    devices = bench.gpus or bench.devices
    ranks = len(devices)
    if ranks < 2:
        report.skip("collectives", ONE_DEVICE)
        return report
    backend = "nccl" if bench.gpus else "gloo"
    end_s = time.monotonic() + bench.budget_s
    meeting = bench.folder / f"collectives-{os.getpid()}"
    gang = [
        Contestant.start(
            f"{backend}:{rank}",
            lambda rank=rank: Rank(rank, ranks, backend, meeting),  # type: ignore[misc]
            device.cores,
            len(device.cores),
        )
        for rank, device in enumerate(devices)
    ]
    try:
        with closing(gang):
            report.facts.update(ask_all([(one, ("join", {})) for one in gang], 2 * _WITHIN_S)[0])
            _measure(bench, report, gang, backend, end_s)
    except ContestantFailed as failure:
        if failure.kind != "unavailable":
            raise
        report.skip("collectives", failure.reason)
    finally:
        with suppress(FileNotFoundError):
            meeting.unlink()
    return report


def _measure(bench: ProbeBench, report: ProbeReport, gang: list[Contestant], backend: str, end_s: float) -> None:
    ranks = len(gang)
    most_bytes = bench.memory_bytes // (8 * ranks)
    step = _ITEM_BYTES * ranks
    sizes = [size // step * step for size in SIZES_BYTES if step <= size <= most_bytes]
    even_s = bench.budget_s / (len(BUS_FACTORS) * len(sizes))
    wrong = checked = 0
    for number, (operation, factor) in enumerate(BUS_FACTORS.items()):
        curves: dict[str, list[float]] = {"algbw": [], "busbw": []}
        took_s: dict[int, float] = {}
        for done, size in enumerate(sizes):
            parts_left = (len(BUS_FACTORS) - number) * len(sizes) - done
            part_s = _part_s(end_s - time.monotonic(), parts_left, even_s)
            if _expected_s(took_s, size) * FEWEST_ROUNDS > _MOST_PARTS * part_s:
                report.skip(operation, f"messages of {size} bytes and more would take this probe over its time")
                break
            bench.progress(f"collectives: {operation} of {size} bytes")

            def check(operation: str = operation, size: int = size) -> None:
                nonlocal wrong, checked
                asked = ("check", {"operation": operation, "total_bytes": size})
                wrong += sum(ask_all([(one, asked) for one in gang]))
                checked += 1

            one_s = [0.0]

            def time_block(
                count: int, operation: str = operation, size: int = size, one_s: list[float] = one_s
            ) -> float:
                asked = {"operation": operation, "total_bytes": size, "count": count}
                asked["settle"] = one_s[0] < _SETTLE_BELOW_S
                block_s = float(max(ask_all([(one, ("time", asked)) for one in gang])))
                one_s[0] = block_s / count
                return block_s

            check()
            count, took = time_runs(time_block, run_s=_RUN_S, budget_s=part_s, first_count=1)
            took_s[size] = took.median / count
            at = {"message_bytes": size, "ranks": ranks}
            method = f"{backend}, {ranks} processes, float32, blocks of {count} back to back, the slowest rank's time"
            for name, share in (("algbw", 1.0), ("busbw", factor(ranks))):
                reading = report.rate(
                    f"{operation}_{name}",
                    took,
                    bytes=round(count * size * share),
                    count=count,
                    method=f"{method}; {name} as nccl-tests defines it",
                    at=at,
                    working_set_bytes=size,
                    statistic="median",
                )
                assert reading.value is not None
                curves[name].append(reading.value)
            if size == sizes[0]:
                report.latency(f"{operation}_latency", took, count=count, bytes=count * size, method=method, at=at)
        for name, values in curves.items():
            x = [float(size) for size in sizes[: len(values)]]
            report.curve(f"{operation}_{name}", "message_bytes", x, name, values, at={"ranks": ranks})
    detail = f"{checked} operations on {ranks} ranks, {wrong} elements were not exact"
    report.check("content", wrong == 0, "the exact result", detail)


def _part_s(left_s: float, parts_left: int, even_s: float) -> float:
    """What the next of so many parts gets: starts, checks and slow sizes took from what is left for all."""
    return max(left_s / parts_left, _LEAST_SHARE * even_s)


def _expected_s(took_s: dict[int, float], size: int) -> float:
    """What a larger message will take: the two largest so far on a straight line; 0 where nothing is known yet."""
    *_, (one, one_s), (two, two_s) = [(0, 0.0), (1, 0.0), *took_s.items()]
    return two_s + max(0.0, two_s - one_s) / (two - one) * (size - two) if len(took_s) > 1 else two_s


class Rank:
    """One of the processes."""

    def __init__(self, rank: int, ranks: int, backend: str, meeting: Path) -> None:
        self._rank, self._ranks, self._backend, self._meeting = rank, ranks, backend, meeting
        self._buffers: tuple[str, int, Any, Any] | None = None

    def join(self) -> dict[str, Any]:
        """Meet the others: facts about what connects them. Raises Unavailable where torch lacks the backend."""
        import torch
        import torch.distributed as dist

        is_there = dist.is_nccl_available() if self._backend == "nccl" else dist.is_gloo_available()
        if not is_there:
            raise Unavailable(f"this build of torch has no {self._backend}")
        # A TCP store would listen on every interface; ranks of one host meet over a file.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._device = torch.device("cpu")
        if self._backend == "nccl":
            self._device = torch.device("cuda", self._rank)
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            self._backend,
            store=torch._C._distributed_c10d.FileStore(str(self._meeting), self._ranks),
            rank=self._rank,
            world_size=self._ranks,
            timeout=timedelta(seconds=_WITHIN_S),
            device_id=self._device if self._backend == "nccl" else None,
        )
        facts: dict[str, Any] = {"backend": self._backend, "ranks": self._ranks}
        if self._backend == "nccl":
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return facts

    def check(self, operation: str, total_bytes: int) -> int:
        """Run it once on numbers whose sums are exact: how many elements came out otherwise."""
        import torch

        sent, received = self._buffers_for(operation, total_bytes)
        period = torch.arange(total_bytes // _ITEM_BYTES, device=self._device) % _PERIOD + 1
        mine = period.chunk(self._ranks)[self._rank]
        if operation == "all_gather":
            sent.copy_(mine)
            right = period
        else:
            sent.copy_(period + _PERIOD * self._rank)
            right = (period if operation == "all_reduce" else mine) * self._ranks
            right = right + _PERIOD * (self._ranks * (self._ranks - 1) // 2)
        if received is not sent:
            received.fill_(-1)
        self._run(operation, sent, received)
        wrong = int((received != right.to(torch.float32)).sum())
        sent.zero_()
        return wrong

    def time(self, operation: str, total_bytes: int, count: int, settle: bool) -> float:
        """Seconds of `count` of them back to back: from when every rank was ready until this one's device was done.

        `settle`: after one that is not timed.
        """
        import torch
        import torch.distributed as dist

        sent, received = self._buffers_for(operation, total_bytes)
        wait = torch.cuda.synchronize if self._backend == "nccl" else int
        if settle:
            self._run(operation, sent, received)
        dist.barrier()
        wait()
        begun_s = time.perf_counter()
        for _ in range(count):
            self._run(operation, sent, received)
        wait()
        return time.perf_counter() - begun_s

    @staticmethod
    def _run(operation: str, sent: Any, received: Any) -> None:
        import torch.distributed as dist

        if operation == "all_reduce":
            dist.all_reduce(sent)
        elif operation == "reduce_scatter":
            dist.reduce_scatter_single(received, sent)
        else:
            dist.all_gather_single(received, sent)

    def _buffers_for(self, operation: str, total_bytes: int) -> tuple[Any, Any]:
        """(sent, received): all-reduce works in place."""
        import torch

        if self._buffers is None or self._buffers[:2] != (operation, total_bytes):
            items, share = total_bytes // _ITEM_BYTES, total_bytes // _ITEM_BYTES // self._ranks
            sent = torch.zeros(share if operation == "all_gather" else items, device=self._device)
            received = sent
            if operation != "all_reduce":
                received = torch.zeros(share if operation == "reduce_scatter" else items, device=self._device)
            self._buffers = (operation, total_bytes, sent, received)
        return self._buffers[2], self._buffers[3]
