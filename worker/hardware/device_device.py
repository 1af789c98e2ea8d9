"""Probe `device_device`: each GPU's own memory, and copies between GPUs.

Figures: `device_copy` (a GPU copies within its memory: bytes read plus bytes written); for each pair `peer_copy` one
way, `peer_both_ways`, `peer_latency` of 1 MiB. Table `peer_access`: which GPU reaches which other's memory itself (else
the driver stages copies through the host). `environment` tells the NVLinks that are up, by NVML.

One process, pinned to the cores of all devices, drives all GPUs. What arrived is compared with what was sent. Written
with care, and not yet run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations, permutations
from typing import Any

from torchstone.fitness import NO_CUDA
from torchstone.results import Table
from worker.hardware.links import links
from worker.hardware.pair import ask_all, closing
from worker.hardware.probe import ProbeBench, ProbeReport, Repeats
from worker.measure.contestant import Contestant
from worker.measure.statistics import FEWEST_ROUNDS

COPY_BYTES = 1 << 30
PEER_BYTES = 256 << 20
SMALL_BYTES = 1 << 20
_CACHES = 4
"""A copy's working set is this many times the last-level cache at least."""
_COPIES = 10
"""Within one GPU, in one run: they are over so soon that the wait for their end would count."""
_MOST_MEMORY_SHARE = 0.25


def run(bench: ProbeBench) -> ProbeReport:
    """Measure the GPUs of the job."""
    report = ProbeReport("device_device")
    names = [gpu.name for gpu in bench.gpus]
    if not names:
        report.skip("device_device", NO_CUDA)
        return report
    report.facts["nvlinks"] = {gpu.name: links(gpu.uuid).get("nvlinks", []) for gpu in bench.gpus}
    pairs = len(names) * (len(names) - 1)
    part_s = bench.budget_s / (len(names) + 2.5 * pairs)
    cores = tuple(sorted({core for gpu in bench.gpus for core in gpu.cores}))
    contestant = Contestant.start("gpus", lambda: Gpus(len(names), bench.seed), cores, len(cores))
    with closing([contestant]):
        for index, name in enumerate(names):
            _ask(bench, report, contestant, "device_copy", {"device": name}, {"index": index, "part_s": part_s})
        if len(names) < 2:
            report.skip("peer", "copies between GPUs need two of them, and this job holds one")
            return report
        (access,) = ask_all([(contestant, ("peer_access", {}))])
        rows = [[name, *row] for name, row in zip(names, access, strict=True)]
        report.tables.append(Table(name="peer_access", columns=["from", *names], rows=rows))
        for i, j in permutations(range(len(names)), 2):
            at = {"from": names[i], "to": names[j], "peer_access": access[i][j]}
            arguments = {"source": i, "target": j, "part_s": part_s}
            _ask(bench, report, contestant, "peer_copy", at, arguments)
            _ask(bench, report, contestant, "peer_latency", at, arguments)
        for i, j in combinations(range(len(names)), 2):
            at = {"between": names[i], "and": names[j], "peer_access": access[i][j] and access[j][i]}
            arguments = {"source": i, "target": j, "part_s": part_s}
            _ask(bench, report, contestant, "peer_both_ways", at, arguments)
    return report


def _ask(
    bench: ProbeBench,
    report: ProbeReport,
    contestant: Contestant,
    what: str,
    at: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    bench.progress(f"device_device: {what} {' '.join(str(value) for value in at.values())}")
    (told,) = ask_all([(contestant, (what, arguments))])
    took, size, count, method = Repeats(tuple(told["seconds"])), told["bytes"], told["count"], told["method"]
    working_set_bytes = told["working_set_bytes"]
    if what == "peer_latency":
        report.latency(what, took, count=count, bytes=size, method=method, at=at, working_set_bytes=working_set_bytes)
    else:
        report.rate(what, took, bytes=size, count=count, method=method, at=at, working_set_bytes=working_set_bytes)
    where = "_".join(str(value) for key, value in at.items() if key != "peer_access")
    report.check(f"{what}_{where}_content", told["wrong_bytes"] == 0, "what was sent", f"{told['wrong_bytes']} wrong")


class Gpus:
    """The process that drives all GPUs of the job."""

    def __init__(self, gpus: int, seed: int) -> None:
        self._gpus, self._seed = gpus, seed

    def peer_access(self) -> list[list[bool]]:
        """[i][j]: whether GPU i reaches the memory of GPU j; its own counts as reached."""
        import torch

        every = range(self._gpus)
        return [[i == j or bool(torch.cuda.can_device_access_peer(i, j)) for j in every] for i in every]

    def device_copy(self, index: int, part_s: float) -> dict[str, Any]:
        """A copy from one half of a working set far larger than the GPU's cache to the other."""
        import torch

        cuda: Any = torch.cuda
        properties = cuda.get_device_properties(index)
        free_bytes, _ = cuda.mem_get_info(index)
        wanted = max(COPY_BYTES, _CACHES * int(getattr(properties, "L2_cache_size", 0)))
        size = min(wanted, int(free_bytes * _MOST_MEMORY_SHARE)) // (1 << 20) * (1 << 20)
        source, target = self._random(size, index), torch.zeros(size, dtype=torch.uint8, device=f"cuda:{index}")

        def copy() -> None:
            for _ in range(_COPIES):
                target.copy_(source)

        seconds = self._repeat(copy, part_s, index)
        return self._told(
            seconds, 2 * size * _COPIES, _COPIES, "Tensor.copy_, bytes read plus bytes written", source, target
        )

    def peer_copy(self, source: int, target: int, part_s: float) -> dict[str, Any]:
        """From GPU to GPU, one way."""
        sent, received = self._ends(source, target, PEER_BYTES)
        seconds = self._repeat(lambda: received.copy_(sent, non_blocking=True), part_s, source, target)
        return self._told(seconds, sent.nbytes, 1, "Tensor.copy_, each byte counts once", sent, received)

    def peer_latency(self, source: int, target: int, part_s: float) -> dict[str, Any]:
        """A small copy, waited for."""
        sent, received = self._ends(source, target, SMALL_BYTES)
        seconds = self._repeat(lambda: received.copy_(sent, non_blocking=True), part_s / 2, source, target)
        method = "Tensor.copy_ of 1 MiB, both GPUs synchronised"
        return self._told(seconds, sent.nbytes, 1, method, sent, received)

    def peer_both_ways(self, source: int, target: int, part_s: float) -> dict[str, Any]:
        """Both ways at once, each on a stream of the GPU that it leaves."""
        import torch

        cuda: Any = torch.cuda
        there, back = self._ends(source, target, PEER_BYTES), self._ends(target, source, PEER_BYTES)
        streams = (cuda.Stream(device=source), cuda.Stream(device=target))

        def both() -> None:
            for stream, (sent, received) in zip(streams, (there, back), strict=True):
                with cuda.stream(stream):
                    received.copy_(sent, non_blocking=True)

        seconds = self._repeat(both, part_s, source, target)
        told = self._told(seconds, 2 * PEER_BYTES, 2, "Tensor.copy_ on two streams at once; the bytes of both", *there)
        told["wrong_bytes"] += self._wrong(*back)
        return told

    def _random(self, size: int, index: int) -> Any:
        import torch

        device = torch.device("cuda", index)
        generator = torch.Generator(device).manual_seed(self._seed)
        return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=generator)

    def _ends(self, source: int, target: int, size: int) -> tuple[Any, Any]:
        import torch

        return self._random(size, source), torch.zeros(size, dtype=torch.uint8, device=f"cuda:{target}")

    def _told(
        self, seconds: list[float], size: int, count: int, method: str, sent: Any, received: Any
    ) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "bytes": size,
            "count": count,
            "method": method,
            "working_set_bytes": sent.nbytes + received.nbytes,
            "wrong_bytes": self._wrong(sent, received),
        }

    @staticmethod
    def _wrong(sent: Any, received: Any) -> int:
        # By way of the host, where it must be the same: not by the path that is in doubt.
        return int((sent.cpu() != received.cpu()).sum())

    @staticmethod
    def _repeat(call: Callable[[], object], part_s: float, *gpus: int) -> list[float]:
        """Seconds of each call, these GPUs idle at both ends; the first one is the warm-up."""
        import torch

        def wait() -> None:
            for gpu in gpus:
                torch.cuda.synchronize(gpu)

        seconds = list[float]()
        end_s = time.perf_counter() + part_s
        while len(seconds) < 1 + FEWEST_ROUNDS or (time.perf_counter() < end_s and len(seconds) < 2000):
            wait()
            begun_s = time.perf_counter()
            call()
            wait()
            seconds.append(time.perf_counter() - begun_s)
        return seconds[1:]
