"""The experiments: one file per kind, each `run(spec, bench) -> Result`; the table below is how a kind is found.

Imported only below the wall (by `worker.child`), since every workload imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torchstone.results import Result
from worker.bench import Bench

MODULES = {
    "jit": "worker.workloads.jit",
    "async": "worker.workloads.async_",
    "parallel": "worker.workloads.parallel",
    "train": "worker.workloads.train",
    "hardware": "worker.workloads.hardware",
    "sleep": "worker.workloads.sleep",  # a diagnostic, accepted only where a setting says so
}


def workload(kind: str) -> Callable[[Any, Bench], Result]:
    """The `run` function of a kind."""
    run: Callable[[Any, Bench], Result] = import_module(MODULES[kind]).run
    return run
