"""Which strategies can run where, in words for `skipped`.

unavailable(setting, facts)            # None, or "nn.DataParallel is for GPUs: ..."
"""

from __future__ import annotations

from typing import Any

from torchstone import fitness
from worker.contestants import inductor
from worker.parallel.setting import Setting


def unavailable(setting: Setting, facts: dict[str, Any]) -> str | None:
    """Why this strategy cannot run on these devices with this model (`Reference.facts`); None where it can."""
    devices = setting.world_size
    unfit = fitness.unfit(setting.spec, setting.kind).get(setting.strategy)
    if unfit is not None:
        return unfit
    if setting.strategy == "pipeline" and facts["layers"] < devices:
        return fitness.too_few_layers(facts["layers"], devices)
    if setting.strategy == "tensor" and not facts["pairs"][str(devices)]:
        return "no two layers of this model, one feeding the other unit by unit, can be cut over the devices"
    return inductor.no_compiler() if setting.is_compiled and setting.is_cpu else None
