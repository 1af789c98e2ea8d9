"""Specs of `train`: accepted as the documents show them, their faults pointed at, models fitted to their data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchstone.errors import InvalidRequest
from torchstone.models import LayersModel, PresetModel
from torchstone.specs import EXAMPLES, TrainSpec, parse_spec
from torchstone.training import AdamW, Scaling, Sgd, Strategy

SHOWN: dict[str, Any] = {
    "kind": "train",
    "model": {"preset": "lenet"},
    "dataset": {"name": "fashion_mnist"},
    "strategies": ["single", "scratch", "ddp"],
    "devices": {"type": "auto", "count": 2},
    "epochs": 10,
    "batch_size": 256,
    "eval_batch_size": 1024,
    "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.0},
    "loss_reduction": "mean",
    "lr_scaling": "none",
    "shuffle": True,
    "drop_last": False,
    "batch_norm": "per_device",
    "dtype": "float32",
    "compile": False,
    "max_steps": None,
    "target_accuracy": None,
    "record_steps": False,
}
LINEAR = {"type": "Linear", "in_features": 64, "out_features": 10}
EMBEDDING = {"type": "Embedding", "num_embeddings": 3, "embedding_dim": 1}


def parsed(**changes: Any) -> TrainSpec:
    spec = parse_spec({"kind": "train", "model": {"preset": "mlp"}, **changes})
    assert isinstance(spec, TrainSpec)
    return spec


def layers(*bodies: dict[str, Any], shape: list[int]) -> dict[str, Any]:
    return {"layers": list(bodies), "input_shape": shape}


def inline(x: list[Any], y: list[int], **more: Any) -> dict[str, Any]:
    return {"inline": {"x": x, "y": y, "classes": 2, **more}}


def test_the_documented_spec_is_accepted_and_comes_back() -> None:
    spec = parse_spec(SHOWN)
    assert isinstance(spec, TrainSpec)
    told = json.loads(spec.model_dump_json())
    assert {key: told[key] for key in SHOWN if key not in ("model", "optimizer")} == {
        key: SHOWN[key] for key in SHOWN if key not in ("model", "optimizer")
    }
    assert parse_spec(told) == spec


def test_the_example_is_a_small_job_on_digits() -> None:
    spec = parse_spec(EXAMPLES["train"])
    assert isinstance(spec, TrainSpec)
    assert spec.strategies == [Strategy.single, Strategy.scratch, Strategy.ddp]
    assert spec.input_shape == (1, 8, 8)


def test_defaults() -> None:
    spec = parsed()
    assert spec.dataset.classes == 10 and spec.dataset.samples + spec.dataset.test_samples == 1797
    assert spec.optimizer == Sgd() and spec.scaling == [Scaling.strong] and spec.lr_scaling == "none"
    optimizer = parsed(optimizer={"name": "adamw"}).optimizer
    assert isinstance(optimizer, AdamW) and optimizer.weight_decay == 0.01


def test_a_kind_keeps_its_fields_to_itself() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_spec({"kind": "train", "model": {"preset": "mlp"}, "variants": ["eager"]})
    assert caught.value.errors == [{"pointer": "/variants", "detail": "unknown field"}]


@pytest.mark.parametrize(
    ("changes", "pointer", "said"),
    [
        ({"optimizer": {"name": "sgd", "lr": float("nan")}}, "/optimizer/lr", "finite"),
        ({"optimizer": {"name": "sgd", "lr": float("inf")}}, "/optimizer/lr", "finite"),
        ({"optimizer": {"name": "sgd", "lr": "nan"}}, "/optimizer/lr", "valid number"),
        ({"optimizer": {"name": "sgd", "lr": -0.1}}, "/optimizer/lr", "greater than or equal to 0"),
        ({"optimizer": {"name": "lion"}}, "/optimizer/name", "there are: sgd, adam, adamw"),
        ({"optimizer": {"name": "adam", "momentum": 0.9}}, "/optimizer/momentum", "unknown field"),
        ({"optimizer": {"name": "sgd", "nesterov": True}}, "/optimizer/nesterov", "needs a momentum"),
        ({"optimizer": "sgd"}, "/optimizer", "must be an object such as"),
        ({"strategies": ["ddp", "ddp"]}, "/strategies", "each may be named once"),
        ({"strategies": ["ddp", "zero"]}, "/strategies/1", "Input should be 'single'"),
        ({"strategies": []}, "/strategies", "at least 1 item"),
        ({"batch_size": 0}, "/batch_size", "greater than or equal to 1"),
        ({"batch_size": 1443, "drop_last": True}, "/batch_size", "there are 1442 samples"),
        ({"batch_size": 4, "gradient_accumulation": 5}, "/gradient_accumulation", "cannot be cut into 5"),
        ({"dataset": {"upload": "mine"}}, "/dataset/upload", "uploaded cannot be named yet"),
        ({"dataset": {"name": "imagenet"}}, "/dataset/name", "'digits' or 'fashion_mnist'"),
        ({"dataset": {}}, "/dataset", "this one has none of them"),
        ({"dataset": {"name": "digits", "synthetic": {}}}, "/dataset", "has name and synthetic"),
        ({"dataset": {"synthetic": {"samples": 1, "sample": 2}}}, "/dataset/synthetic/sample", "unknown field"),
        ({"dataset": {"synthetic": {"shape": [2**20, 2**20]}}}, "/dataset/synthetic/samples", "more than a host"),
        ({"dataset": inline([[1], [2]], [0])}, "/dataset/inline/y", "1 labels for 2 samples"),
        ({"dataset": inline([[1], [2]], [0, 2])}, "/dataset/inline/y/1", "label 2 is not below classes (2)"),
        ({"dataset": inline([[1], [2, 3]], [0, 1])}, "/dataset/inline/x/1", "another shape"),
        ({"dataset": inline([[1], [None]], [0, 1])}, "/dataset/inline/x/1", "finite numbers only"),
        ({"dataset": inline([[1], [10**400]], [0, 1])}, "/dataset/inline/x/1", "finite numbers only"),
        ({"dataset": inline([1, 2], [0, 1])}, "/dataset/inline/x/0", "must be a list of numbers"),
        ({"dataset": inline([[[]]], [0])}, "/dataset/inline/x/0", "must be a list of numbers"),
        ({"dataset": inline([[1]], [0], x_test=[[1]])}, "/dataset/inline/x_test", "given together"),
        ({"dataset": inline([[1]], [0], x_test=[[1, 2]], y_test=[0])}, "/dataset/inline/x_test/0", "another shape"),
        ({"dataset": inline([[1]], [0], x_test=[[1]], y_test=[9])}, "/dataset/inline/y_test/0", "label 9"),
        ({"dataset": inline([[1]], [0]), "resize": [2, 2]}, "/resize", "is for images"),
        ({"dataset": inline([[1]], [0]), "augment": {"flip": True}}, "/augment", "is for images"),
        ({"dataset": inline([[1]], [0]), "model": {"preset": "lenet"}}, "/model/preset", "takes images"),
        ({"resize": [8, 8], "model": {"preset": "lenet"}}, "/model/preset", "at least 14x14"),
        ({"model": {"preset": "mlp", "classes": 2}}, "/model/classes", "the data have 10 classes"),
        ({"model": {"preset": "mlp", "input_shape": [512]}}, "/model/input_shape", "a sample of the data is [1, 8, 8]"),
        ({"model": layers(LINEAR, shape=[1, 64])}, "/model/input_shape", "a sample of the data is [1, 8, 8]"),
        (
            {"model": layers({"type": "Flatten"}, {**LINEAR, "out_features": 9}, shape=[1, 8, 8])},
            "/model/layers",
            "end in [9], but the data have 10 classes",
        ),
        ({"model": layers(EMBEDDING, {"type": "Flatten"}, shape=[2])}, "/model/input_shape", "[1, 8, 8]"),
        (
            {"model": layers(EMBEDDING, {"type": "Flatten"}, shape=[2]), "dataset": inline([[0, 3]], [0])},
            "/dataset",
            "integers from 0 to 2",
        ),
        (
            {
                "model": layers(EMBEDDING, {"type": "Flatten"}, shape=[2]),
                "dataset": {"synthetic": {"shape": [2], "classes": 2}},
            },
            "/dataset",
            "give inline data",
        ),
    ],
)
def test_faults_point_at_what_the_client_wrote(changes: dict[str, Any], pointer: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**changes)
    (fault,) = caught.value.errors
    assert fault["pointer"] == pointer
    assert said in fault["detail"]


@pytest.mark.parametrize(
    ("model", "dataset", "shape", "image_size"),
    [
        ({"preset": "mlp"}, {"name": "digits"}, (1, 8, 8), None),
        ({"preset": "mlp"}, {"name": "fashion_mnist"}, (1, 28, 28), None),
        ({"preset": "mlp"}, inline([[1.0]], [0]), (1,), None),
        ({"preset": "lenet"}, {"name": "digits"}, (1, 28, 28), (28, 28)),
        ({"preset": "lenet"}, {"name": "fashion_mnist"}, (1, 28, 28), None),
        ({"preset": "lenet", "input_shape": [1, 14, 14]}, {"name": "fashion_mnist"}, (1, 14, 14), (14, 14)),
        ({"preset": "resnet18"}, {"synthetic": {"shape": [3, 32, 32]}}, (3, 28, 28), (28, 28)),
        ({"preset": "transformer"}, {"name": "digits"}, (1, 8, 8), None),
        ({"preset": "transformer"}, {"synthetic": {"shape": [5, 7]}}, (5, 7), None),
        (layers(LINEAR, shape=[64]), {"name": "digits"}, (64,), None),
        (layers({"type": "Flatten"}, LINEAR, shape=[1, 8, 8]), {"name": "digits"}, (1, 8, 8), None),
    ],
)
def test_models_are_fitted_to_their_data(
    model: dict[str, Any], dataset: dict[str, Any], shape: tuple[int, ...], image_size: tuple[int, int] | None
) -> None:
    spec = parsed(model=model, dataset=dataset)
    assert spec.input_shape == shape and spec.image_size == image_size
    fitted = spec.fitted_model
    if isinstance(fitted, PresetModel):
        assert fitted.shape == shape and fitted.outputs == spec.dataset.classes
        assert PresetModel.model_validate(fitted.model_dump()) == fitted
        assert fitted.initial == PresetModel.model_validate(model).initial
    else:
        assert isinstance(fitted, LayersModel) and tuple(fitted.input_shape) == shape


def test_images_are_resized_on_request_and_then_flattened() -> None:
    spec = parsed(model=layers({**LINEAR, "in_features": 16}, shape=[16]), resize=[4, 4])
    assert spec.image_size == (4, 4) and spec.data_shape == (1, 4, 4) and spec.input_shape == (16,)


def test_the_learning_rate_grows_only_on_request() -> None:
    assert parsed().lr_factor(4) == 1
    assert parsed(lr_scaling="linear").lr_factor(4) == 4
    assert parsed(lr_scaling="sqrt").lr_factor(4) == 2


def test_huge_and_zero_learning_rates_are_numbers_like_others() -> None:
    for lr in (0, 0.0, 3e38):
        optimizer = parsed(optimizer={"name": "sgd", "lr": lr}).optimizer
        assert optimizer.lr == lr
