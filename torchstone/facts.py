"""What is known of a model before anyone builds it, for defaults, estimates and refusals. No torch.

    facts(PresetModel(preset="mlp")).parameters                 # 164482
    memory_estimate_bytes(model, 256, "float32", grad=True)     # the job takes at least this

The presets are written as the same layers that a client could list, so that there is one arithmetic for all. Counted
are the outputs of layers; what a layer needs inside (attention's scores, a convolution's workspace) is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torchstone.layers import LAYERS, Layer, parse_layer
from torchstone.models import LayersModel, Preset, PresetModel
from torchstone.shapes import Shape

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}


@dataclass(frozen=True)
class Step:
    """One layer at work on one sample."""

    layer: Layer
    input_shape: Shape
    output_shape: Shape

    @property
    def parameters(self) -> int:
        return LAYERS[self.layer.type].parameters(self.layer)

    @property
    def pair_elements(self) -> int:
        """Elements of input and output together; a view of the input takes nothing of its own."""
        output = math.prod(self.output_shape)
        return output if LAYERS[self.layer.type].aliases else math.prod(self.input_shape) + output


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model; activations are counted for one sample."""

    parameters: int
    largest_activation_elements: int
    activation_elements: int
    """Sum of all layers' outputs."""
    largest_pair_elements: int
    """The most that one layer's input and output take together."""
    input_shape: Shape
    output_shape: Shape
    input_dtype: Literal["float", "int64"]
    high: int | None
    """Where the input is int64: its values are from 0 to high - 1."""
    has_dropout: bool
    has_batch_norm: bool

    def parameter_bytes(self, dtype: str) -> int:
        """Bytes of all parameters in `dtype`, such as "float32"."""
        return self.parameters * BYTES[dtype]


def facts(model: PresetModel | LayersModel) -> ModelFacts:
    """The facts of a model that a spec names."""
    steps = steps_of(model)
    first = steps[0].layer
    high = getattr(first, "num_embeddings", None)
    outputs = [math.prod(step.output_shape) for step in steps]
    return ModelFacts(
        parameters=sum(step.parameters for step in steps),
        largest_activation_elements=max(outputs),
        activation_elements=sum(outputs),
        largest_pair_elements=max(step.pair_elements for step in steps),
        input_shape=steps[0].input_shape,
        output_shape=steps[-1].output_shape,
        input_dtype="float" if high is None else "int64",
        high=high,
        has_dropout=any(_drops(step.layer) for step in steps),
        has_batch_norm=any(step.layer.type.startswith("BatchNorm") for step in steps),
    )


def memory_estimate_bytes(model: PresetModel | LayersModel, batch_size: int, dtype: str, grad: bool) -> int:
    """A lower bound of the memory that running `model` takes: a host with less cannot hold it.

    Weights once (with `grad` their gradients too) and the input and output of the largest layer.
    """
    known = facts(model)
    weights = known.parameter_bytes(dtype) * (2 if grad else 1)
    return weights + known.largest_pair_elements * batch_size * BYTES[dtype]


def steps_of(model: PresetModel | LayersModel) -> list[Step]:
    """Every layer of the model with the shapes of its input and output, in the order of execution."""
    if isinstance(model, LayersModel):
        return _chain(model.parsed, tuple(model.input_shape))
    return _PRESETS[model.preset](model.shape, model.outputs)


def _chain(layers: list[Layer], shape: Shape) -> list[Step]:
    steps = []
    for layer in layers:
        steps.append(Step(layer, shape, LAYERS[layer.type].shape(layer, shape)))
        shape = steps[-1].output_shape
    return steps


def _drops(layer: Any) -> bool:
    probability = layer.p if "Dropout" in layer.type else getattr(layer, "dropout", 0.0)
    return bool(probability > 0)


def _layer(type_: str, **arguments: Any) -> Layer:
    return parse_layer({"type": type_, **arguments})


def _linear(in_features: int, out_features: int) -> Layer:
    return _layer("Linear", in_features=in_features, out_features=out_features)


def _conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0) -> Layer:
    sizes = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
    return _layer("Conv2d", in_channels=in_channels, out_channels=out_channels, **sizes)


def _mlp(shape: Shape, classes: int) -> list[Step]:
    relu = _layer("ReLU")
    flatten = [_layer("Flatten")] if len(shape) > 1 else []
    width = math.prod(shape)
    return _chain([*flatten, _linear(width, 256), relu, _linear(256, 128), relu, _linear(128, classes)], shape)


def _lenet(shape: Shape, classes: int) -> list[Step]:
    relu, pool = _layer("ReLU"), _layer("AvgPool2d", kernel_size=2)
    convolutions = [_conv(shape[0], 20, 3), relu, pool, _conv(20, 50, 5), relu, pool, _layer("Flatten")]
    steps = _chain(convolutions, shape)
    (width,) = steps[-1].output_shape
    return steps + _chain([_linear(width, 128), relu, _linear(128, classes)], (width,))


def _resnet18(shape: Shape, classes: int) -> list[Step]:
    relu = _layer("ReLU")
    steps = _chain([_conv(shape[0], 64, 3, padding=1), _layer("BatchNorm2d", num_features=64), relu], shape)
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        steps += _residual(steps[-1].output_shape, channels, stride)
        steps += _residual(steps[-1].output_shape, channels, 1)
    pool = _layer("AdaptiveAvgPool2d", output_size=1)
    return steps + _chain([pool, _layer("Flatten"), _linear(512, classes)], steps[-1].output_shape)


def _transformer(shape: Shape, classes: int) -> list[Step]:
    """The linear and normalising layers in order; what attention does between them is not counted."""
    tokens, features = (shape[1], shape[0] * shape[2]) if len(shape) == 3 else shape
    project, norm = _linear(64, 64), _layer("LayerNorm", normalized_shape=64)
    block = [norm, project, project, project, project, norm, _linear(64, 128), _layer("GELU"), _linear(128, 64)]
    steps = _chain([_linear(features, 64), *block, *block, norm], (tokens, features))
    return [replace(steps[0], input_shape=shape), *steps[1:], *_chain([_linear(64, classes)], (64,))]


def _residual(shape: Shape, channels: int, stride: int) -> list[Step]:
    """Two convolutions, beside them a 1x1 one where the shape changes; their sum has the shape of the last ReLU."""
    relu, norm = _layer("ReLU"), _layer("BatchNorm2d", num_features=channels)
    main = [_conv(shape[0], channels, 3, stride, padding=1), norm, relu, _conv(channels, channels, 3, padding=1), norm]
    steps = _chain(main, shape)
    if stride != 1 or shape[0] != channels:
        steps += _chain([_conv(shape[0], channels, 1, stride)], shape)
    return steps + _chain([relu], steps[-1].output_shape)


_PRESETS: dict[Preset, Callable[[Shape, int], list[Step]]] = {
    "mlp": _mlp,
    "lenet": _lenet,
    "resnet18": _resnet18,
    "transformer": _transformer,
}
