"""Which strategies can run where, in words for `skipped`.

unavailable(setting, facts)            # None, or "needs CUDA: ..."
"""

from __future__ import annotations

from typing import Any

from worker.parallel.loop import STRATEGIES
from worker.parallel.setting import Setting


def unavailable(setting: Setting, facts: dict[str, Any]) -> str | None:
    """Why this strategy cannot run on these devices with this model; None where it can."""
    if setting.strategy == "replicate" and not setting.is_cuda:
        return "nn.DataParallel is for GPUs: on CPU devices PyTorch's falls through to the plain model on one"
    if setting.strategy not in STRATEGIES:
        return "not built in this version"
    return None
