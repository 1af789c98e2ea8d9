"""A list of layers as one nn.Sequential.

    sequential([parse_layer({"type": "Linear", "in_features": 2, "out_features": 1}), parse_layer({"type": "ReLU"})])

The arguments were checked by `torchstone.layers`; what torch still refuses becomes an InvalidModel with the layer's
number. Names are looked up in that table only: no other class of torch.nn can be reached through a spec.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from torchstone.errors import InvalidModel, OutOfMemory
from torchstone.layers import LAYERS, Layer


class Sqrt(nn.Module):
    """The element-wise square root; NaN where the input is negative."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x)


_MEMORY = re.compile("allocate memory|not enough memory|Storage size calculation overflowed")
OWN: dict[str, type[nn.Module]] = {"Sqrt": Sqrt}


def sequential(layers: list[Layer]) -> nn.Sequential:
    """The layers one after another.

    Raises InvalidModel for a layer that torch does not build, OutOfMemory for one whose weights do not fit.
    """
    modules = []
    for index, layer in enumerate(layers):
        try:
            modules.append(module_of(layer))
        except (ValueError, TypeError, RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or _MEMORY.search(str(error)):
                count = LAYERS[layer.type].parameters(layer)
                detail = f"layer {index} ({layer.type}): its {count} parameters do not fit into memory"
                raise OutOfMemory(detail) from error
            raise InvalidModel(f"layer {index} ({layer.type}) cannot be built: {error}") from error
    return nn.Sequential(*modules)


def module_of(layer: Layer) -> nn.Module:
    """One layer as a module."""
    assert layer.type in LAYERS
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in layer.model_dump(exclude={"type"}).items()
    }
    if layer.type in ("Softmax", "LogSoftmax", "Softmin") and arguments["dim"] is None:
        arguments["dim"] = 1  # torch's implicit choice for the shapes that were let through, without its warning
    module_type: type[nn.Module] = OWN.get(layer.type) or getattr(nn, layer.type)
    return module_type(**arguments)
