"""Imported once by the forkserver, so that a job's process starts with torch already there.

The forkserver must stay single-threaded: it imports, and never runs a tensor operation (after a multi-threaded one,
every fork of it would hang), nor asks CUDA anything.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import warnings

from worker import hugepages, processes

# Whoever stops the worker's process group means the worker: it still needs its jobs, and this, to hand them back.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # orphans of jobs end here: as meant
processes.die_with_parent()
processes.become_subreaper()

# A job's code has no business with the database's password, nor with the bucket's.
for _name in [name for name in os.environ if name.startswith(("TORCHSTONE_", "AWS_", "AZURE_", "GOOGLE_"))]:
    del os.environ[_name]

# numpy's BLAS reads it when it is loaded: after a product its helper threads spin 2^20 cycles (half a millisecond,
# longer than the gap to the next product of a loop) and not 100 ms, in which they slow whoever is timed next.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")

for _module in (
    "numpy.ma",  # numpy's own first uses of these two would be in every job
    "numpy.random",
    "torch.utils.serialization.config",
    "torch",
    "worker.launch",
    "worker.child",
    "worker.workloads.jit",
    "worker.workloads.async_",
):
    importlib.import_module(_module)

# What the first use of TorchScript and of the version look-ups costs a process is paid here, once.
importlib.import_module("worker.contestants.torchscript").preload()
importlib.import_module("worker.measure.environment").libraries()
# Validators are built when they are first used, which takes 20 ms.
for _spec in ({"kind": "jit", "model": {"preset": "mlp"}}, {"kind": "async"}):
    importlib.import_module("torchstone.specs").parse_spec(_spec)
gc.freeze()  # what is loaded now stays: collections in the forks need not look at it
hugepages.collapse()  # every job forks this process, and forks itself again and again
