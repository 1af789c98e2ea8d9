"""The optimiser that a spec names, on these parameters.

optimizer = make_optimizer(spec.optimizer, module.parameters())
set_learning_rate(optimizer, 0.1)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from torchstone.training import Adam, AdamW, Sgd


def make_optimizer(spec: Sgd | Adam | AdamW, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD, Adam or AdamW with the spec's numbers; its learning rate is set step by step.

    Without any parameters (a pipeline's stage of activations only) it has one of its own that nobody uses.
    """
    numbers = spec.model_dump(exclude={"name"})
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    return kinds[spec.name](list(parameters) or [nn.Parameter(torch.zeros(()))], **numbers)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """For all parameters, from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
