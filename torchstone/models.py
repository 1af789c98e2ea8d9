"""The models that a spec can name: a preset of the chapter, or a list of torch.nn layers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from torchstone.strict import Strict

Init = Literal["default", "zeros", "normal"]


class PresetModel(Strict):
    """One of the chapter's networks."""

    preset: Literal["mlp", "lenet", "resnet18"]
    init: Init | None = None


class LayersModel(Strict):
    """torch.nn layers, one after another."""

    layers: list[dict[str, Any]] = Field(min_length=1, max_length=512)
    input_shape: list[int] = Field(min_length=1, max_length=8)
    init: Init = "default"


ModelSpec = PresetModel | LayersModel
