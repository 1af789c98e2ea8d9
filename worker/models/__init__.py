"""The networks that specs can name, as real modules with reproducible weights and inputs.

    module = build(spec.model, seed=spec.seed)
    x, = inputs(spec.model, batch_size=256, seed=spec.seed)
    y = module(x)

The same seed gives the same weights and inputs on every device: both are drawn on the CPU, from generators that leave
the process's own random state as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchstone.facts import facts
from torchstone.models import LayersModel, PresetModel
from worker.models.initial import set_initial_weights
from worker.models.layers import sequential
from worker.models.presets import PRESETS

__all__ = ["build", "inputs"]


def build(model: PresetModel | LayersModel, seed: int) -> nn.Module:
    """The module that `model` describes, on the CPU, in float32 and in training mode.

    Raises InvalidModel for a layer that torch does not build, OutOfMemory for one whose weights do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if isinstance(model, PresetModel):
            module = PRESETS[model.preset](model.shape, model.outputs)
        else:
            module = sequential(model.parsed)
        set_initial_weights(module, model.initial)
    return module


def inputs(
    model: PresetModel | LayersModel,
    batch_size: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """What to call the module with: (batch_size, *input_shape), standard normal, or integers for an Embedding.

    Where the model brings an `example_input`, every row is that one.
    """
    known = facts(model)
    integers = known.input_dtype == "int64"
    if isinstance(model, LayersModel) and model.example_input is not None:
        row = torch.tensor(model.example_input, dtype=torch.int64 if integers else torch.float64)
        x = row.expand(batch_size, *row.shape)
    else:
        shape = (batch_size, *known.input_shape)
        generator = torch.Generator().manual_seed(seed)
        if known.high is not None:
            x = torch.randint(known.high, shape, generator=generator)
        else:
            x = torch.randn(shape, generator=generator)
    return (x.to(device=device, dtype=torch.int64 if integers else dtype).contiguous(),)
