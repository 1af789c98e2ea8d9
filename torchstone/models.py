"""The models that a spec can name: a preset of the chapter, or a list of torch.nn layers.

    {"preset": "lenet"}
    {"layers": [{"type": "Linear", "in_features": 512, "out_features": 2}], "input_shape": [512], "init": "zeros"}

A list of layers is checked against its input's shape, layer by layer and without torch, while the spec is parsed: a
layer that does not fit is refused with a pointer to it. What is known of a model before anyone builds it (parameters,
activations, shapes) is in `torchstone.facts`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, TypeAdapter, WrapValidator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from torchstone.arguments import LIMIT, Size
from torchstone.layers import LAYERS, Layer, layer_schema, parse_layer
from torchstone.shapes import Misfit, Shape
from torchstone.strict import Strict, refusal

Init = Literal["default", "zeros", "normal"]


def _preset_init(preset: Any) -> Init:
    return "normal" if preset in ("lenet", "resnet18") else "default"


Preset = Literal["mlp", "lenet", "resnet18", "transformer"]
PRESET_SHAPES: dict[Preset, tuple[Shape, int]] = {
    "mlp": ((512,), 2),
    "lenet": ((1, 28, 28), 10),
    "resnet18": ((1, 28, 28), 10),
    "transformer": ((1, 28, 28), 10),
}
"""The input's shape and the number of classes that each preset has unless told."""

_LENET_LEAST = 14  # pixels of height and width that its convolutions and pools leave one of


class PresetModel(Strict):
    """One of the chapter's networks, or a small transformer that reads an image row by row."""

    preset: Preset
    init: Init | None = Field(
        None,
        description="Initial weights: torch's default, all zeros, or N(0, 0.01) with zero biases. "
        "Unless given: default for mlp and transformer, normal for lenet and resnet18, as the chapter has them.",
    )
    input_shape: Annotated[tuple[Size, ...], Field(strict=False, min_length=1, max_length=8)] | None = Field(
        None,
        description="Of one sample: without the batch. null = the preset's own: 512 numbers for mlp, else 1x28x28.",
    )
    classes: int | None = Field(
        None, ge=1, le=1_000_000, description="Outputs. null = the preset's own: 2 for mlp, else 10."
    )

    @model_validator(mode="before")
    @classmethod
    def _init_is_told(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("init") is None:
            return {**body, "init": _preset_init(body.get("preset"))}
        return body

    @model_validator(mode="after")
    def _input_is_of_its_kind(self) -> Self:
        fault = _preset_fault(self.preset, self.shape)
        if fault:
            raise refusal([(("input_shape",), fault)])
        return self

    @property
    def initial(self) -> Init:
        """`init` with the preset's own choice filled in."""
        return self.init or _preset_init(self.preset)

    @property
    def shape(self) -> Shape:
        """`input_shape` with the preset's own filled in."""
        return PRESET_SHAPES[self.preset][0] if self.input_shape is None else self.input_shape

    @property
    def outputs(self) -> int:
        """`classes` with the preset's own filled in."""
        return PRESET_SHAPES[self.preset][1] if self.classes is None else self.classes


def _preset_fault(preset: Preset, shape: Shape) -> str | None:
    """Why a preset cannot take samples of this shape."""
    if math.prod(shape) > LIMIT:
        return f"{list(shape)} is more than a sample may hold ({LIMIT} numbers)"
    if preset in ("lenet", "resnet18") and len(shape) != 3:
        return f"{preset} takes images, [channels, height, width], but this is {list(shape)}"
    if preset == "lenet" and min(shape[1:]) < _LENET_LEAST:
        return f"lenet takes images of at least {_LENET_LEAST}x{_LENET_LEAST}, but this is {list(shape)}"
    if preset == "transformer" and len(shape) not in (2, 3):
        return f"transformer takes [tokens, features] or images, read row by row, but this is {list(shape)}"
    return None


def _layer(body: Any, _: Any) -> dict[str, Any]:
    return parse_layer(body).model_dump()


class _LayerSchema:
    """In a JSON Schema it is one of the layers; the classes of all of them are made only when one is asked for."""

    @staticmethod
    def __get_pydantic_json_schema__(_: CoreSchema, describe: GetJsonSchemaHandler) -> JsonSchemaValue:
        return describe(TypeAdapter(layer_schema()).core_schema)


LayerBody = Annotated[dict[str, Any], WrapValidator(_layer), _LayerSchema]


class LayersModel(Strict):
    """torch.nn layers, one after another."""

    layers: list[LayerBody] = Field(min_length=1, max_length=512)
    input_shape: list[Size] = Field(min_length=1, max_length=8, description="Of one sample: without the batch.")
    init: Init = Field("default", description="Initial weights; zeros = every parameter 0, normal = N(0, 0.01).")
    example_input: list[Any] | None = Field(
        None, description="One sample, nested as input_shape says, to run on in place of random numbers."
    )

    @property
    def initial(self) -> Init:
        """The initial weights to give it."""
        return self.init

    @property
    def parsed(self) -> list[Layer]:
        """The layers as checked arguments."""
        return [parse_layer(body) for body in self.layers]

    @model_validator(mode="after")
    def _layers_fit(self) -> Self:
        layers, shape = self.parsed, tuple(self.input_shape)
        own_tensor = False
        for index, layer in enumerate(layers):
            row = LAYERS[layer.type]
            if layer.type == "Embedding" and index:
                raise refusal([(("layers", index), f"layer {index} (Embedding) must come first: it takes integers")])
            if getattr(layer, "inplace", False) and not own_tensor:
                detail = "in place it would overwrite the model's own input; set it to false"
                raise refusal([(("layers", index, "inplace"), detail)])
            own_tensor = own_tensor or not row.aliases
            shape = _next_shape(index, layer, shape)
        if self.example_input is not None:
            high = getattr(layers[0], "num_embeddings", None)
            fault = _example_fault(self.example_input, tuple(self.input_shape), high)
            if fault:
                raise refusal([(("example_input",), fault)])
        return self


def _next_shape(index: int, layer: Layer, shape: Shape) -> Shape:
    try:
        after = LAYERS[layer.type].shape(layer, shape)
    except Misfit as misfit:
        detail = f"layer {index} ({layer.type}) expects {misfit.expects} but gets {list(shape)}"
        raise refusal([(("layers", index), detail)]) from None
    if math.prod(after) > LIMIT**2:
        detail = f"layer {index} ({layer.type}) makes {list(after)} of one sample, which no machine can hold"
        raise refusal([(("layers", index), detail)])
    return after


def _example_fault(value: Any, shape: Shape, high: int | None) -> str | None:
    """What is wrong with `value` as a nested list of numbers of this shape (integers under `high`, where given)."""
    if shape:
        if not isinstance(value, list) or len(value) != shape[0]:
            return f"must be nested lists of the shape of input_shape; a list of {shape[0]} is missing somewhere"
        return next((fault for item in value if (fault := _example_fault(item, shape[1:], high))), None)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "must hold finite numbers only"
    if high is not None and (not isinstance(value, int) or not 0 <= value < high):
        return f"must hold integers from 0 to {high - 1} for the Embedding"
    return None


PLANNED = {
    "upload": "models that were uploaded cannot be named yet; for now name a preset or list the layers",
    "library": "models of other libraries cannot be named yet; for now name a preset or list the layers",
}


def _model(body: Any, _: Any) -> PresetModel | LayersModel:
    """Choose the class by the key that is there, so that every fault points into what the client wrote."""
    if isinstance(body, (PresetModel, LayersModel)):
        return body
    if not isinstance(body, dict):
        raise refusal([((), 'must be an object such as {"preset": "mlp"}')])
    ways = [key for key in ("preset", "layers", *PLANNED) if key in body]
    if len(ways) != 1:
        found = f"has {' and '.join(ways)}" if ways else "has neither"
        raise refusal([((), f"must name a model in one way, by preset or by layers; this one {found}")])
    if ways[0] in PLANNED:
        raise refusal([((ways[0],), PLANNED[ways[0]])])
    return (PresetModel if ways[0] == "preset" else LayersModel).model_validate(body)


ModelSpec = Annotated[PresetModel | LayersModel, WrapValidator(_model)]
