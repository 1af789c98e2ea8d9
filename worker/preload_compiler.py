"""Imported once by the forkserver of jobs that compile, train, distribute or probe: `worker.preload`, and what is slow.

The optimisers and the distributed library import dynamo at their first use: so trainings want it there as well.
"""

from __future__ import annotations

import gc
import importlib

from worker import hugepages

for _module in (
    "worker.preload",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.export",
    "worker.workloads.parallel",
    "worker.workloads.train",
    "worker.workloads.hardware",
    "torch.distributed",
    "safetensors.torch",
):
    importlib.import_module(_module)

gc.freeze()
hugepages.collapse()
