"""The table of layers: what is taken, what is refused, and with which words. Without torch."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from torchstone.layers import LAYERS, layer_schema, parse_layer
from torchstone.shapes import Misfit


def faults(body: Any) -> list[tuple[tuple[int | str, ...], str]]:
    with pytest.raises(ValidationError) as caught:
        parse_layer(body)
    return [(fault["loc"], fault["msg"].removeprefix("Value error, ")) for fault in caught.value.errors()]


def shape_of(body: dict[str, Any], *shape: int) -> tuple[int, ...]:
    layer = parse_layer(body)
    return LAYERS[layer.type].shape(layer, shape)


def test_defaults_are_filled_in() -> None:
    layer = parse_layer({"type": "Conv2d", "in_channels": 1, "out_channels": 6, "kernel_size": [5, 3]})
    assert layer.model_dump() == {
        "type": "Conv2d",
        "in_channels": 1,
        "out_channels": 6,
        "kernel_size": [5, 3],
        "stride": 1,
        "padding": 0,
        "dilation": 1,
        "groups": 1,
        "bias": True,
        "padding_mode": "zeros",
    }
    assert parse_layer(layer.model_dump()) == layer


def test_a_list_of_one_is_its_entry() -> None:
    assert parse_layer({"type": "MaxPool1d", "kernel_size": [3]}) == parse_layer(
        {"type": "MaxPool1d", "kernel_size": 3}
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("linear", "unknown layer type 'linear' (did you mean Linear?)"),
        ("Conv2", "unknown layer type 'Conv2' (did you mean Conv2d?)"),
        ("Relu", "unknown layer type 'Relu' (did you mean ReLU?)"),
        ("__init__", "unknown layer type '__init__'"),
        (3, "unknown layer type '3'"),
    ],
)
def test_an_unknown_type_gets_close_matches(name: Any, said: str) -> None:
    assert faults({"type": name}) == [(("type",), said)]


def test_what_is_no_layer_at_all() -> None:
    assert faults("ReLU") == [((), 'must be an object such as {"type": "ReLU"}')]
    assert faults({}) == [(("type",), "the field is required: the name of a torch.nn layer")]


def test_an_unknown_argument_is_pointed_at() -> None:
    said = "Linear has no argument 'in_feats' (did you mean in_features?); it takes: in_features, out_features, bias"
    assert faults({"type": "Linear", "in_feats": 1, "out_features": 2}) == [(("in_feats",), said)]
    assert faults({"type": "Tanh", "x": 1}) == [(("x",), "Tanh has no argument 'x'; it takes: none")]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"type": "Linear", "in_features": 1}, "out_features"),
        ({"type": "Linear", "in_features": "1", "out_features": 2}, "in_features"),
        ({"type": "Linear", "in_features": 1.0, "out_features": 2}, "in_features"),
        ({"type": "Linear", "in_features": True, "out_features": 2}, "in_features"),
        ({"type": "Linear", "in_features": 0, "out_features": 2}, "in_features"),
        ({"type": "Linear", "in_features": 2**31 + 1, "out_features": 2}, "in_features"),
        ({"type": "Linear", "in_features": 10**400, "out_features": 2}, "in_features"),
        ({"type": "Linear", "in_features": 1, "out_features": 2, "bias": 1}, "bias"),
        ({"type": "Dropout", "p": 1.5}, "p"),
        ({"type": "Dropout", "p": float("nan")}, "p"),
        ({"type": "ELU", "alpha": float("inf")}, "alpha"),
        ({"type": "ELU", "alpha": 10**400}, "alpha"),
        ({"type": "Upsample", "scale_factor": 10**400}, "scale_factor"),
        ({"type": "Upsample", "scale_factor": float("nan")}, "scale_factor"),
        ({"type": "GELU", "approximate": "sigmoid"}, "approximate"),
        ({"type": "MaxPool2d", "kernel_size": [3, 3, 3]}, "kernel_size"),
        ({"type": "MaxPool2d", "kernel_size": None}, "kernel_size"),
        ({"type": "MaxPool2d", "kernel_size": 2, "stride": 0}, "stride"),
        ({"type": "Conv1d", "in_channels": 1, "out_channels": 1, "kernel_size": 1, "padding": "full"}, "padding"),
        ({"type": "LayerNorm", "normalized_shape": []}, "normalized_shape"),
    ],
)
def test_a_wrong_argument_is_pointed_at(body: dict[str, Any], place: str) -> None:
    assert [place for place, _ in faults(body)] == [(place,)]


@pytest.mark.parametrize(
    ("body", "place", "said"),
    [
        (
            {"type": "Conv1d", "in_channels": 4, "out_channels": 6, "kernel_size": 1, "groups": 4},
            "groups",
            "must divide in_channels and out_channels, but 4 does not divide 6",
        ),
        (
            {"type": "Conv1d", "in_channels": 1, "out_channels": 1, "kernel_size": 3, "stride": 2, "padding": "same"},
            "padding",
            "'same' needs stride 1",
        ),
        (
            {"type": "ConvTranspose1d", "in_channels": 1, "out_channels": 1, "kernel_size": 3, "output_padding": 1},
            "output_padding",
            "must be smaller than stride or dilation",
        ),
        (
            {"type": "GroupNorm", "num_groups": 3, "num_channels": 4},
            "num_groups",
            "must divide num_channels, but 3 does not divide 4",
        ),
        (
            {"type": "MaxPool2d", "kernel_size": [4, 2], "padding": 2},
            "padding",
            "must be at most half of kernel_size",
        ),
        ({"type": "Hardtanh", "min_val": 1}, "min_val", "must be smaller than max_val"),
        (
            {"type": "Unflatten", "dim": 1, "unflattened_size": [-1, -1]},
            "unflattened_size",
            "must be integers of at least 1, of which one may be -1",
        ),
        ({"type": "Upsample"}, "size", "exactly one of size and scale_factor must be given"),
        (
            {"type": "Upsample", "size": 2, "align_corners": True},
            "align_corners",
            "is only for the modes linear, bilinear, bicubic and trilinear",
        ),
        (
            {"type": "Embedding", "num_embeddings": 3, "embedding_dim": 1, "padding_idx": 3},
            "padding_idx",
            "must lie within num_embeddings (3)",
        ),
        (
            {"type": "TransformerEncoderLayer", "d_model": 4, "nhead": 2},
            "batch_first",
            "must be true: inputs here are (batch, sequence, features)",
        ),
        (
            {"type": "TransformerEncoderLayer", "d_model": 4, "nhead": 3, "batch_first": True},
            "nhead",
            "must divide d_model, but 3 does not divide 4",
        ),
    ],
)
def test_arguments_that_disagree(body: dict[str, Any], place: str, said: str) -> None:
    assert faults(body) == [((place,), said)]


def test_shapes_by_hand() -> None:
    conv = {"type": "Conv2d", "in_channels": 1, "out_channels": 20, "kernel_size": 3}
    assert shape_of(conv, 1, 28, 28) == (20, 26, 26)
    assert shape_of({"type": "AvgPool2d", "kernel_size": 2}, 50, 9, 9) == (50, 4, 4)
    assert shape_of({"type": "AvgPool2d", "kernel_size": 2, "ceil_mode": True}, 50, 9, 9) == (50, 5, 5)
    assert shape_of({"type": "Flatten"}, 50, 4, 4) == (800,)
    assert shape_of({"type": "Flatten", "start_dim": 2}, 50, 4, 4) == (50, 16)
    assert shape_of({"type": "AdaptiveAvgPool2d", "output_size": [None, 1]}, 3, 5, 7) == (3, 5, 1)
    assert shape_of({"type": "ZeroPad2d", "padding": [1, 2, 3, 4]}, 1, 10, 10) == (1, 17, 13)


@pytest.mark.parametrize(
    ("body", "shape", "expects"),
    [
        ({"type": "Linear", "in_features": 256, "out_features": 2}, (512,), "[.., 256]"),
        ({"type": "Conv2d", "in_channels": 3, "out_channels": 2, "kernel_size": 1}, (28, 28), "[3, height, width]"),
        (
            {"type": "Conv2d", "in_channels": 3, "out_channels": 2, "kernel_size": [5, 1]},
            (3, 4, 4),
            "at least [3, 5, 1] for its kernel",
        ),
        ({"type": "BatchNorm1d", "num_features": 8}, (7,), "[8] or [8, length]"),
        ({"type": "LayerNorm", "normalized_shape": [3, 4]}, (3, 5), "[.., 3, 4]"),
        ({"type": "Softmax"}, (3, 5), "a dim where the input has two dimensions after the batch's"),
        ({"type": "Softmax", "dim": 0}, (3,), "a dim other than the batch's (dim 0)"),
        ({"type": "Softmax", "dim": -2}, (3,), "a dim other than the batch's (dim -2)"),
        ({"type": "Softmax", "dim": 2}, (3,), "at least 2 dimensions after the batch's (dim 2)"),
        ({"type": "Softmax", "dim": -4}, (3,), "at least 3 dimensions after the batch's (dim -4)"),
        ({"type": "Flatten", "start_dim": 0}, (3,), "a dim other than the batch's (dim 0)"),
        ({"type": "Unflatten", "dim": 1, "unflattened_size": [2, 2]}, (5,), "a size that unfolds into [2, 2] in dim 1"),
        (
            {"type": "Upsample", "size": 4, "mode": "bilinear"},
            (3, 4),
            "3 dimensions after the batch's for mode 'bilinear'",
        ),
    ],
)
def test_a_misfit_says_what_was_expected(body: dict[str, Any], shape: tuple[int, ...], expects: str) -> None:
    with pytest.raises(Misfit) as caught:
        shape_of(body, *shape)
    assert caught.value.expects == expects


def test_the_schema_knows_every_type() -> None:
    schema = TypeAdapter(layer_schema()).json_schema()
    assert set(schema["discriminator"]["mapping"]) == set(LAYERS)
