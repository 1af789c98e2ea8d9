"""The probes, by name: a module each, with `run(bench) -> ProbeReport`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from worker.hardware.probe import ProbeBench, ProbeReport

MODULES = {
    "memory": "worker.hardware.memory",
    "cache": "worker.hardware.cache",
    "vector": "worker.hardware.vector",
    "gemm": "worker.hardware.gemm",
    "storage": "worker.hardware.storage",
    "process": "worker.hardware.process",
    "network": "worker.hardware.network",
    "host_device": "worker.hardware.host_device",
    "device_device": "worker.hardware.device_device",
    "collectives": "worker.hardware.collectives",
}

SHARES = {
    "memory": 14,
    "cache": 12,
    "vector": 8,
    "gemm": 9,
    "storage": 12,
    "process": 5,
    "network": 5,
    "host_device": 4,
    "device_device": 4,
    "collectives": 9,
}
"""How the time of a job is shared out, in relation to each other; what a probe leaves over, the later ones get."""


def probe(name: str) -> Callable[[ProbeBench], ProbeReport]:
    """The `run` function of a probe."""
    run: Callable[[ProbeBench], ProbeReport] = import_module(MODULES[name]).run
    return run
