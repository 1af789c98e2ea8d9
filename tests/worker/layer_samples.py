"""Random arguments and fitting input shapes for every layer type: {"Linear": strategy of (arguments, shape), ...}."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from torchstone.layers import LAYERS, parse_layer
from torchstone.shapes import Misfit

Sample = tuple[dict[str, Any], list[int]]
Draw = Callable[[st.SearchStrategy[Any]], Any]

few = st.integers(1, 3)
some = st.integers(1, 12)
flag = st.booleans()
probability = st.sampled_from([0.0, 0.3, 0.5])
numbers = st.floats(-2, 2, allow_nan=False)
positive = st.floats(0.125, 4)
any_shape = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def sizes(n: int, low: int, high: int) -> st.SearchStrategy[Any]:
    """torch's int-or-tuple."""
    return st.integers(low, high) | st.lists(st.integers(low, high), min_size=n, max_size=n)


def image(n: int, low: int = 1, high: int = 12, channels: int | None = None) -> st.SearchStrategy[list[int]]:
    """[channels, ...n spatial sizes]"""
    first = few if channels is None else st.just(channels)
    return st.tuples(first, *[st.integers(low, high)] * n).map(list)


def optional(required: dict[str, Any], **others: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of which the others may be left to their defaults."""
    return st.fixed_dictionaries({key: st.just(value) for key, value in required.items()}, optional=others)


def plain(**arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Sample]:
    """Layers that take any shape and have no required arguments."""
    return st.tuples(optional({}, **arguments), any_shape)


def fitting(name: str, samples: st.SearchStrategy[Sample]) -> st.SearchStrategy[Sample]:
    """Those that the contract accepts; whether torch agrees is the test's question."""

    def fits(sample: Sample) -> bool:
        try:
            layer = parse_layer({"type": name, **sample[0]})
            LAYERS[name].shape(layer, tuple(sample[1]))
        except (Misfit, ValueError):
            return False
        return True

    return samples.filter(fits)


@st.composite
def convolution(draw: Draw, n: int) -> Sample:
    groups = draw(st.integers(1, 2))
    channels = [groups * draw(few), groups * draw(few)]
    required = {"in_channels": channels[0], "out_channels": channels[1], "kernel_size": draw(sizes(n, 1, 3))}
    same = draw(flag)
    arguments = draw(
        optional(
            required,
            groups=st.just(groups),
            bias=flag,
            dilation=sizes(n, 1, 2),
            padding=st.sampled_from(["same", "valid"]) if same else sizes(n, 0, 2),
            padding_mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
            **({} if same else {"stride": sizes(n, 1, 3)}),
        )
    )
    return arguments, draw(image(n, 3, 9 if n < 3 else 5, channels[0]))


@st.composite
def transposed_convolution(draw: Draw, n: int) -> Sample:
    groups = draw(st.integers(1, 2))
    channels = [groups * draw(few), groups * draw(few)]
    required = {"in_channels": channels[0], "out_channels": channels[1], "kernel_size": draw(sizes(n, 1, 3))}
    others = {"stride": sizes(n, 1, 3), "padding": sizes(n, 0, 1), "output_padding": sizes(n, 0, 1)}
    arguments = draw(optional(required, groups=st.just(groups), bias=flag, dilation=sizes(n, 1, 2), **others))
    return arguments, draw(image(n, 2, 6, channels[0]))


@st.composite
def channel_norm(draw: Draw, shapes: st.SearchStrategy[list[int]]) -> Sample:
    shape = draw(shapes)
    others = {"affine": flag, "track_running_stats": flag, "bias": flag, "momentum": probability, "eps": positive}
    return draw(optional({"num_features": shape[0]}, **others)), shape


@st.composite
def group_norm(draw: Draw) -> Sample:
    groups = draw(few)
    shape = [groups * draw(few), *draw(st.lists(few, max_size=3))]
    required = {"num_groups": groups, "num_channels": shape[0]}
    return draw(optional(required, affine=flag, bias=flag, eps=positive)), shape


@st.composite
def layer_norm(draw: Draw, /, **others: st.SearchStrategy[Any]) -> Sample:
    shape = draw(any_shape)
    trailing = draw(st.integers(1, len(shape)))
    normalized: Any = shape[-trailing:]
    if trailing == 1 and draw(flag):
        normalized = shape[-1]
    return draw(optional({"normalized_shape": normalized}, elementwise_affine=flag, eps=positive, **others)), shape


@st.composite
def linear(draw: Draw) -> Sample:
    shape = draw(any_shape)
    return draw(optional({"in_features": shape[-1], "out_features": draw(some)}, bias=flag)), shape


@st.composite
def prelu(draw: Draw) -> Sample:
    shape = draw(any_shape)
    return draw(optional({}, num_parameters=st.sampled_from([1, shape[0]]), init=numbers)), shape


@st.composite
def unflatten(draw: Draw) -> Sample:
    shape = draw(any_shape)
    dim = draw(st.integers(1, len(shape)))
    parts = draw(st.lists(few, min_size=1, max_size=3))
    shape[dim - 1] = 1
    for part in parts:
        shape[dim - 1] *= part
    if draw(flag):
        parts[0] = -1
    return {"dim": draw(st.sampled_from([dim, dim - len(shape) - 1])), "unflattened_size": parts}, shape


@st.composite
def pool(draw: Draw, /, n: int, required: dict[str, Any] | None = None, **others: st.SearchStrategy[Any]) -> Sample:
    arguments = {"kernel_size": draw(sizes(n, 1, 4)), **(required or {})}
    return draw(optional(arguments, stride=sizes(n, 1, 4), ceil_mode=flag, **others)), draw(image(n, 3, 9))


@st.composite
def adaptive_pool(draw: Draw, n: int) -> Sample:
    one = st.integers(1, 5)
    entry = one | st.none() if n > 1 else one
    return {"output_size": draw(one | st.lists(entry, min_size=n, max_size=n))}, draw(image(n))


@st.composite
def upsample(draw: Draw) -> Sample:
    n = draw(few)
    interpolating = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[n]
    mode = draw(st.sampled_from(["nearest", "nearest-exact", *interpolating]))
    corners = {"align_corners": flag} if mode in interpolating else {}
    size, factor = sizes(n, 1, 6), st.floats(0.4, 3) | st.lists(st.floats(0.4, 3), min_size=n, max_size=n)
    target = {"size": draw(size)} if draw(flag) else {"scale_factor": draw(factor)}
    return draw(optional({"mode": mode, **target}, **corners)), draw(image(n, 1, 6))


@st.composite
def pixel_shuffle(draw: Draw) -> Sample:
    factor = draw(few)
    return {"upscale_factor": factor}, [draw(few) * factor**2, draw(few), draw(few)]


@st.composite
def embedding(draw: Draw) -> Sample:
    rows = draw(some)
    required = {"num_embeddings": rows, "embedding_dim": draw(some)}
    return draw(optional(required, padding_idx=st.integers(-rows, rows - 1))), draw(any_shape)


@st.composite
def encoder(draw: Draw) -> Sample:
    heads = draw(few)
    required = {"d_model": heads * draw(few), "nhead": heads, "batch_first": True, "dim_feedforward": draw(some)}
    activation = st.sampled_from(["relu", "gelu"])
    others = {"dropout": probability, "norm_first": flag, "bias": flag, "layer_norm_eps": positive}
    return draw(optional(required, activation=activation, **others)), [draw(some), required["d_model"]]


_dropout: dict[str, Any] = {"p": probability}
_bounds: dict[str, Any] = {"min_val": st.floats(-3, -0.5), "max_val": st.floats(0.5, 3)}
_dims = st.integers(-4, 4)
_average: dict[str, Any] = {"count_include_pad": flag}

_raw: dict[str, st.SearchStrategy[Sample]] = {
    "Linear": linear(),
    "Conv1d": convolution(1),
    "Conv2d": convolution(2),
    "Conv3d": convolution(3),
    "ConvTranspose1d": transposed_convolution(1),
    "ConvTranspose2d": transposed_convolution(2),
    "BatchNorm1d": channel_norm(image(1) | few.map(lambda channels: [channels])),
    "BatchNorm2d": channel_norm(image(2)),
    "BatchNorm3d": channel_norm(image(3, 1, 4)),
    "InstanceNorm1d": channel_norm(image(1)),
    "InstanceNorm2d": channel_norm(image(2)),
    "LayerNorm": layer_norm(bias=flag),
    "RMSNorm": layer_norm(),
    "GroupNorm": group_norm(),
    "Dropout": plain(**_dropout),
    "Dropout1d": st.tuples(optional({}, **_dropout), image(1)),
    "Dropout2d": st.tuples(optional({}, **_dropout), image(2)),
    "Dropout3d": st.tuples(optional({}, **_dropout), image(3, 1, 4)),
    "AlphaDropout": plain(**_dropout),
    "ReLU": plain(),
    "ReLU6": plain(),
    "LeakyReLU": plain(negative_slope=numbers),
    "PReLU": prelu(),
    "ELU": plain(alpha=numbers),
    "SELU": plain(),
    "CELU": plain(alpha=positive),
    "GELU": plain(approximate=st.sampled_from(["none", "tanh"])),
    "SiLU": plain(),
    "Mish": plain(),
    "Sigmoid": plain(),
    "LogSigmoid": plain(),
    "Hardsigmoid": plain(),
    "Tanh": plain(),
    "Tanhshrink": plain(),
    "Hardtanh": plain(**_bounds),
    "Hardswish": plain(),
    "Hardshrink": plain(lambd=numbers),
    "Softshrink": plain(lambd=positive),
    "Softplus": plain(beta=positive, threshold=numbers),
    "Softsign": plain(),
    "Threshold": st.tuples(st.fixed_dictionaries({"threshold": numbers, "value": numbers}), any_shape),
    "Softmax": plain(dim=_dims),
    "LogSoftmax": plain(dim=_dims),
    "Softmin": plain(dim=_dims),
    "GLU": plain(dim=_dims),
    "Sqrt": plain(),
    "MaxPool1d": pool(1, padding=sizes(1, 0, 2), dilation=sizes(1, 1, 2)),
    "MaxPool2d": pool(2, padding=sizes(2, 0, 2), dilation=sizes(2, 1, 2)),
    "MaxPool3d": pool(3, padding=sizes(3, 0, 2), dilation=sizes(3, 1, 2)),
    "AvgPool1d": pool(1, padding=sizes(1, 0, 2), **_average),
    "AvgPool2d": pool(2, padding=sizes(2, 0, 2), divisor_override=few, **_average),
    "LPPool1d": pool(1, {"norm_type": 2}),
    "LPPool2d": pool(2, {"norm_type": 1.5}),
    "AdaptiveAvgPool1d": adaptive_pool(1),
    "AdaptiveAvgPool2d": adaptive_pool(2),
    "AdaptiveAvgPool3d": adaptive_pool(3),
    "AdaptiveMaxPool1d": adaptive_pool(1),
    "AdaptiveMaxPool2d": adaptive_pool(2),
    "Identity": plain(),
    "Flatten": plain(start_dim=_dims, end_dim=_dims),
    "Unflatten": unflatten(),
    "ZeroPad2d": st.tuples(st.fixed_dictionaries({"padding": sizes(4, -2, 3)}), image(2)),
    "PixelShuffle": pixel_shuffle(),
    "Upsample": upsample(),
    "Embedding": embedding(),
    "TransformerEncoderLayer": encoder(),
}

SAMPLES = {name: fitting(name, samples) for name, samples in _raw.items()}
