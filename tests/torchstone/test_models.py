"""Models in specs: parsed with exact pointers, their facts and estimates. Without torch."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from torchstone.errors import InvalidRequest
from torchstone.facts import facts, memory_estimate_bytes
from torchstone.models import LayersModel, PresetModel
from torchstone.specs import JitSpec, parse_spec

LINEAR = {"type": "Linear", "in_features": 512, "out_features": 256}
RELU = {"type": "ReLU"}


def parsed(model: Any) -> PresetModel | LayersModel:
    return parse_spec({"kind": "jit", "model": model}).model


def refused(model: Any) -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as caught:
        parsed(model)
    return [(fault["pointer"], fault["detail"]) for fault in caught.value.errors]


def layers(*bodies: dict[str, Any], shape: list[int]) -> PresetModel | LayersModel:
    return parsed({"layers": list(bodies), "input_shape": shape})


# Parsing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "init"),
    [("mlp", "default"), ("lenet", "normal"), ("resnet18", "normal"), ("transformer", "default")],
)
def test_presets_have_the_chapters_initial_weights(preset: str, init: str) -> None:
    assert parsed({"preset": preset}).init == init
    assert parsed({"preset": preset, "init": None}).init == init
    assert PresetModel.model_validate({"preset": preset}).initial == init
    assert parsed({"preset": preset, "init": "zeros"}).initial == "zeros"


def test_a_list_of_layers_comes_back_with_its_defaults() -> None:
    model = layers(LINEAR, RELU, shape=[512])
    assert isinstance(model, LayersModel)
    assert model.layers == [{**LINEAR, "bias": True}, {**RELU, "inplace": False}]
    assert model.initial == "default"


def test_a_spec_survives_the_way_through_json() -> None:
    for model in ({"preset": "lenet"}, {"layers": [LINEAR, RELU], "input_shape": [512], "init": "zeros"}):
        spec = parse_spec({"kind": "jit", "model": model})
        assert parse_spec(json.loads(spec.model_dump_json())) == spec


@pytest.mark.parametrize(
    ("model", "pointer", "said"),
    [
        ({"preset": "vgg"}, "/model/preset", "Input should be 'mlp', 'lenet', 'resnet18' or 'transformer'"),
        ({"preset": "mlp", "init": "ones"}, "/model/init", "Input should be 'default', 'zeros' or 'normal'"),
        ({"preset": "mlp", "classes": 0}, "/model/classes", "greater than or equal to 1"),
        ({"preset": "lenet", "input_shape": [1, 28, 8]}, "/model/input_shape", "takes images of at least 14x14"),
        ({"preset": "resnet18", "input_shape": [784]}, "/model/input_shape", "[channels, height, width]"),
        ({"preset": "transformer", "input_shape": [784]}, "/model/input_shape", "read row by row"),
        ({"preset": "mlp", "input_shape": [2**20, 2**20]}, "/model/input_shape", "more than a sample may hold"),
        ({"preset": "mlp", "a/b~c": 1}, "/model/a~1b~0c", "unknown field"),
        ({"layers": [RELU]}, "/model/input_shape", "the field is required"),
        (
            {"layers": [RELU], "input_shape": [2, 0]},
            "/model/input_shape/1",
            "Input should be greater than or equal to 1",
        ),
        ({"upload": "x"}, "/model/upload", "models that were uploaded cannot be named yet"),
        ({"library": "timm:resnet50"}, "/model/library", "models of other libraries cannot be named yet"),
        ({}, "/model", "must name a model in one way, by preset or by layers; this one has neither"),
        ({"preset": "mlp", "layers": []}, "/model", "must name a model in one way"),
        ("mlp", "/model", 'must be an object such as {"preset": "mlp"}'),
        (
            {"layers": [LINEAR, RELU, LINEAR], "input_shape": [512]},
            "/model/layers/2",
            "layer 2 (Linear) expects [.., 512] but gets [256]",
        ),
        (
            {"layers": [RELU, {"type": "Lineal"}], "input_shape": [2]},
            "/model/layers/1/type",
            "unknown layer type 'Lineal'",
        ),
        (
            {"layers": [RELU, RELU, {**LINEAR, "in_features": "512"}], "input_shape": [512]},
            "/model/layers/2/in_features",
            "Input should be a valid integer",
        ),
        (
            {"layers": [RELU, {"type": "Embedding", "num_embeddings": 2, "embedding_dim": 2}], "input_shape": [512]},
            "/model/layers/1",
            "layer 1 (Embedding) must come first: it takes integers",
        ),
        (
            {"layers": [{"type": "Flatten"}, {"type": "ReLU", "inplace": True}], "input_shape": [2]},
            "/model/layers/1/inplace",
            "in place it would overwrite the model's own input",
        ),
        (
            {"layers": [{"type": "ZeroPad2d", "padding": 2**31}], "input_shape": [2**31, 2**31, 1]},
            "/model/layers/0",
            "which no machine can hold",
        ),
    ],
)
def test_faults_point_at_what_the_client_wrote(model: Any, pointer: str, said: str) -> None:
    ((found, sentence),) = refused(model)
    assert found == pointer
    assert said in sentence


def test_faults_in_several_layers_come_together() -> None:
    body = {"layers": [{"type": "Linear"}, {"type": "Nothing"}, {"type": "Tanh", "x": 1}], "input_shape": [1]}
    assert [pointer for pointer, _ in refused(body)] == [
        "/model/layers/0/in_features",
        "/model/layers/0/out_features",
        "/model/layers/1/type",
        "/model/layers/2/x",
    ]


def test_in_place_after_a_layer_with_a_tensor_of_its_own() -> None:
    layers(LINEAR, {"type": "ReLU", "inplace": True}, {"type": "Dropout", "inplace": True}, shape=[512])


def test_an_example_input_has_the_inputs_shape() -> None:
    square_root = {"layers": [{"type": "Sqrt"}], "input_shape": [2]}
    model = parsed({**square_root, "example_input": [1, -1]})
    assert isinstance(model, LayersModel) and model.example_input == [1, -1]
    for wrong in ([1], [[1], [2]], [1, None], [1, "2"], [1, True], [1, float("nan")], [1, float("inf")]):
        assert [pointer for pointer, _ in refused({**square_root, "example_input": wrong})] == ["/model/example_input"]
    tokens = {"layers": [{"type": "Embedding", "num_embeddings": 3, "embedding_dim": 1}], "input_shape": [2]}
    parsed({**tokens, "example_input": [0, 2]})
    for wrong in ([0, 3], [0, -1], [0, 1.0]):
        assert [pointer for pointer, _ in refused({**tokens, "example_input": wrong})] == ["/model/example_input"]


def test_the_schema_shows_both_ways_and_the_layers() -> None:
    schema = JitSpec.model_json_schema()
    ways = {way["$ref"] for way in schema["properties"]["model"]["anyOf"]}
    assert ways == {"#/$defs/PresetModel", "#/$defs/LayersModel"}
    assert "Linear" in schema["$defs"]


def test_nothing_here_needs_torch() -> None:
    from subprocess import run

    code = "import sys, torchstone.specs, torchstone.facts; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


# Facts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "parameters", "output_shape"),
    [
        ("mlp", 164_482, (2,)),
        ("lenet", 129_068, (10,)),
        ("resnet18", 11_175_818, (10,)),
        ("transformer", 69_578, (10,)),
    ],
)
def test_presets_have_the_chapters_counts(preset: str, parameters: int, output_shape: tuple[int, ...]) -> None:
    known = facts(parsed({"preset": preset}))
    assert known.parameters == parameters
    assert known.parameter_bytes("float32") == 4 * parameters
    assert known.output_shape == output_shape
    assert known.has_batch_norm == (preset == "resnet18")
    assert not known.has_dropout


def test_activations_of_the_mlp() -> None:
    known = facts(parsed({"preset": "mlp"}))
    assert known.input_shape == (512,)
    assert known.largest_activation_elements == 256
    assert known.activation_elements == 256 + 256 + 128 + 128 + 2
    assert known.largest_pair_elements == 512 + 256


def test_what_an_embedding_takes() -> None:
    known = facts(layers({"type": "Embedding", "num_embeddings": 7, "embedding_dim": 3}, shape=[5]))
    assert (known.input_dtype, known.high) == ("int64", 7)
    assert known.output_shape == (5, 3)
    floats = facts(layers(RELU, shape=[5]))
    assert (floats.input_dtype, floats.high) == ("float", None)


def test_dropout_counts_where_it_drops() -> None:
    encoder = {"type": "TransformerEncoderLayer", "d_model": 4, "nhead": 2, "batch_first": True}
    assert facts(layers({"type": "Dropout2d"}, shape=[1, 2, 2])).has_dropout
    assert not facts(layers({"type": "Dropout", "p": 0}, shape=[2])).has_dropout
    assert facts(layers(encoder, shape=[3, 4])).has_dropout
    assert not facts(layers({**encoder, "dropout": 0}, shape=[3, 4])).has_dropout


def test_memory_is_weights_and_the_largest_pair() -> None:
    model = parsed({"preset": "mlp"})
    pair = (512 + 256) * 100
    assert memory_estimate_bytes(model, 100, "float32", grad=False) == 4 * (164_482 + pair)
    assert memory_estimate_bytes(model, 100, "float32", grad=True) == 4 * (2 * 164_482 + pair)
    assert memory_estimate_bytes(model, 100, "bfloat16", grad=False) == 2 * (164_482 + pair)
    flat = layers({"type": "Flatten"}, shape=[10, 10])
    assert memory_estimate_bytes(flat, 1, "float32", grad=False) == 400


def test_absurd_sizes_stay_plain_numbers() -> None:
    absurd = layers({"type": "Linear", "in_features": 2**31, "out_features": 2**31}, shape=[2**31])
    assert memory_estimate_bytes(absurd, 65536, "float32", grad=False) > 2**64
