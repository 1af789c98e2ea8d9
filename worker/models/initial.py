"""Initial weights: torch's own, all zeros, or the chapter's N(0, 0.01).

    set_initial_weights(module, "normal")      # every module of the list below: weights N(0, 0.01), biases 0

`normal` touches layers that have weights to break the symmetry of; scales of normalisations stay 1, shifts 0. It is
applied to finished modules: the chapter's own way missed lazy layers on the first run.
"""

from __future__ import annotations

import torch
from torch import nn

from torchstone.models import Init

STD = 0.01

_WEIGHTED = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.Embedding,
    nn.MultiheadAttention,
)


@torch.no_grad()
def set_initial_weights(module: nn.Module, init: Init) -> None:
    """Overwrite the weights of `module` in place; random numbers come from torch's default generator."""
    if init == "zeros":
        for parameter in module.parameters():
            parameter.zero_()
    elif init == "normal":
        for part in module.modules():
            if isinstance(part, _WEIGHTED):
                _normal(part)


def _normal(part: nn.Module) -> None:
    for name, parameter in part.named_parameters(recurse=False):
        if name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0, STD)
    if isinstance(part, nn.Embedding) and part.padding_idx is not None:
        part.weight[part.padding_idx].zero_()
