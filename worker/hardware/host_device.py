"""Probe `host_device`: copies between the host's memory and each GPU, and what it costs to launch a kernel.

Figures for each GPU: `to_device`, `to_host` from and to `at.memory` pageable and pinned; `both_ways`, pinned, on two
streams at once; `to_device_latency` and `to_host_latency` of small copies; `launch_returns` (the host is free again)
and `launch_completes` (launched, run and waited for). `environment` tells the PCIe link of each, as NVML sees it.

Every GPU is measured by a process of its own, pinned to the cores that go with it, one after the other. What came back
from the device is compared with what was sent. Written with care, and not yet run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torchstone.fitness import NO_CUDA
from worker.hardware.links import links, pcie_bytes_per_s
from worker.hardware.pair import ask_all, closing
from worker.hardware.probe import ProbeBench, ProbeReport, Repeats
from worker.measure.contestant import Contestant
from worker.measure.statistics import FEWEST_ROUNDS

COPY_BYTES = 256 << 20
SMALL_BYTES = (4096, 1 << 20)
LAUNCHES = 200
"""In one run: a stream takes about a thousand before a launch has to wait for room."""
_PARTS = 11
"""Timed parts of one GPU."""


def run(bench: ProbeBench) -> ProbeReport:
    """Measure each GPU of the job."""
    report = ProbeReport("host_device")
    if not bench.gpus:
        report.skip("host_device", NO_CUDA)
        return report
    copy_bytes = min(COPY_BYTES, bench.memory_bytes // 16) // (1 << 20) * (1 << 20)
    part_s = bench.budget_s / (_PARTS * len(bench.gpus))
    for index, gpu in enumerate(bench.gpus):
        bench.progress(f"host_device: {gpu.name}")
        found = links(gpu.uuid)
        report.facts[gpu.name] = found
        pcie = found.get("pcie", {})
        ceiling = pcie_bytes_per_s(pcie.get("most_generation", 0), pcie.get("most_width", 0))
        if ceiling is not None:
            report.facts[gpu.name]["pcie"]["most_bytes_per_s"] = ceiling
        contestant = Contestant.start(
            f"host:{index}",
            lambda index=index: HostLink(index, copy_bytes, bench.seed),  # type: ignore[misc]
            gpu.cores,
            len(gpu.cores),
        )
        with closing([contestant]):
            (told,) = ask_all([(contestant, ("measure", {"part_s": part_s}))], 30 + 3 * bench.budget_s)
        for row in told["rates"]:
            took = Repeats(tuple(row.pop("seconds")))
            row["at"] = {"device": gpu.name, **row["at"]}
            report.rate(took=took, statistic="best", **row)
        for row in told["latencies"]:
            took = Repeats(tuple(row.pop("seconds")))
            row["at"] = {"device": gpu.name, **row["at"]}
            report.latency(took=took, **row)
        report.check(f"{gpu.name}_content", told["wrong_bytes"] == 0, "what was sent", f"{told['wrong_bytes']} wrong")
    return report


class HostLink:
    """The process that copies to and from GPU number `index`."""

    def __init__(self, index: int, copy_bytes: int, seed: int) -> None:
        import torch

        torch.cuda.set_device(index)
        self._device = torch.device("cuda", index)
        generator = torch.Generator().manual_seed(seed)
        self._pageable = torch.randint(0, 256, (copy_bytes,), dtype=torch.uint8, generator=generator)
        self._pinned = self._pageable.pin_memory()
        self._rates: list[dict[str, Any]] = []
        self._latencies: list[dict[str, Any]] = []
        self._wrong_bytes = 0

    def measure(self, part_s: float) -> dict[str, Any]:
        """Everything; `part_s` for each of the parts."""
        import torch

        on_device = torch.empty_like(self._pinned, device=self._device)
        back = {"pageable": torch.zeros_like(self._pageable), "pinned": torch.zeros_like(self._pinned).pin_memory()}
        for memory, source in (("pageable", self._pageable), ("pinned", self._pinned)):
            is_pinned, target = memory == "pinned", back[memory]
            on_device.zero_()
            at: dict[str, Any] = {"memory": memory}
            self._copy("to_device", on_device, source, is_pinned, part_s, at)
            self._copy("to_host", target, on_device, is_pinned, part_s, at)
            self._wrong_bytes += int((target != source).sum())
        self._both_ways(on_device, back["pinned"], part_s)
        for size in SMALL_BYTES:
            at = {"memory": "pinned", "message_bytes": size}
            host, device, home = self._pinned[:size], on_device[:size], back["pinned"][:size]
            self._copy_latency("to_device_latency", device, host, part_s, at)
            self._copy_latency("to_host_latency", home, device, part_s, at)
        self._launch(part_s)
        return {"rates": self._rates, "latencies": self._latencies, "wrong_bytes": self._wrong_bytes}

    def _copy(self, name: str, target: Any, source: Any, is_pinned: bool, part_s: float, at: dict[str, Any]) -> None:
        seconds = self._repeat(lambda: target.copy_(source, non_blocking=is_pinned), part_s)
        how = "cudaMemcpyAsync" if is_pinned else "cudaMemcpy through the driver's own pinned buffer"
        self._add_rate(name, seconds, source.nbytes, f"Tensor.copy_ ({how}), synchronised; each byte counts once", at)

    def _both_ways(self, on_device: Any, home: Any, part_s: float) -> None:
        import torch

        cuda: Any = torch.cuda
        arriving, leaving = torch.empty_like(on_device), on_device
        there, back = cuda.Stream(), cuda.Stream()
        home.zero_()

        def both() -> None:
            with cuda.stream(there):
                arriving.copy_(self._pinned, non_blocking=True)
            with cuda.stream(back):
                home.copy_(leaving, non_blocking=True)

        seconds = self._repeat(both, part_s)
        method = "Tensor.copy_ on two streams at once, synchronised; the bytes of both ways"
        self._add_rate("both_ways", seconds, 2 * on_device.nbytes, method, {"memory": "pinned"})
        self._wrong_bytes += int((home != self._pinned).sum())
        self._wrong_bytes += int((arriving.cpu() != self._pinned).sum())

    def _copy_latency(self, name: str, target: Any, source: Any, part_s: float, at: dict[str, Any]) -> None:
        seconds = self._repeat(lambda: target.copy_(source, non_blocking=True), part_s)
        self._add_latency(name, seconds, 1, "Tensor.copy_ and cudaDeviceSynchronize", at)

    def _launch(self, part_s: float) -> None:
        """A kernel that waits for no clock tick at all, from Python."""
        import torch

        cuda: Any = torch.cuda
        returns = list[float]()

        def launch() -> None:
            begun_s = time.perf_counter()
            for _ in range(LAUNCHES):
                cuda._sleep(0)
            returns.append(time.perf_counter() - begun_s)

        self._repeat(launch, part_s)
        method = f"{LAUNCHES} kernels in a row, each done at once, launched from Python"
        self._add_latency("launch_returns", returns[1:], LAUNCHES, f"{method}; until the last launch returned", {})
        seconds = self._repeat(lambda: cuda._sleep(0), part_s)
        self._add_latency("launch_completes", seconds, 1, "one such kernel and cudaDeviceSynchronize", {})

    def _add_rate(self, name: str, seconds: list[float], size: int, method: str, at: dict[str, Any]) -> None:
        row = {"name": name, "seconds": seconds, "bytes": size, "method": method, "at": at}
        self._rates.append({**row, "working_set_bytes": size})

    def _add_latency(self, name: str, seconds: list[float], count: int, method: str, at: dict[str, Any]) -> None:
        self._latencies.append({"name": name, "seconds": seconds, "count": count, "method": method, "at": at})

    def _repeat(self, call: Callable[[], object], part_s: float) -> list[float]:
        """Seconds of each call, the device idle at both ends; the first one is the warm-up."""
        import torch

        seconds = list[float]()
        end_s = time.perf_counter() + part_s
        while len(seconds) < 1 + FEWEST_ROUNDS or (time.perf_counter() < end_s and len(seconds) < 2000):
            torch.cuda.synchronize()
            begun_s = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun_s)
        return seconds[1:]
