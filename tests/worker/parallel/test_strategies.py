"""Every strategy equals its reference: for models with and without BatchNorm and dropout, and shares of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.worker.fresh import run_fresh

EVERY = ["single", "scratch", "ddp", "fsdp", "parameter_server", "pipeline", "tensor"]
NORMALISED = {
    "layers": [
        {"type": "Conv2d", "in_channels": 1, "out_channels": 6, "kernel_size": 3},
        {"type": "BatchNorm2d", "num_features": 6},
        {"type": "ReLU"},
        {"type": "Flatten"},
        {"type": "Linear", "in_features": 216, "out_features": 16},
        {"type": "ReLU"},
        {"type": "Dropout", "p": 0.3},
        {"type": "Linear", "in_features": 16, "out_features": 10},
    ],
    "input_shape": [1, 8, 8],
}
IMAGES_DROPPED_OUT = {
    "layers": [
        {"type": "Conv2d", "in_channels": 1, "out_channels": 4, "kernel_size": 3},
        {"type": "Dropout", "p": 0.3},
        {"type": "Flatten"},
        {"type": "Linear", "in_features": 144, "out_features": 16},
        {"type": "ReLU"},
        {"type": "Linear", "in_features": 16, "out_features": 10},
    ],
    "input_shape": [1, 8, 8],
}
BASE: dict[str, Any] = {
    "kind": "train",
    "dataset": {"name": "digits"},
    "strategies": EVERY,
    "devices": {"count": 2},
    "epochs": 1,
    "max_steps": 3,
    "batch_size": 25,
}
CASES: dict[str, dict[str, Any]] = {
    "mlp": {"model": {"preset": "mlp"}, "optimizer": {"name": "adam", "lr": 1e-3}, "parameter_servers": "split"},
    "lenet": {"model": {"preset": "lenet"}, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    "dropout_of_images": {"model": IMAGES_DROPPED_OUT},
    "transformer": {"model": {"preset": "transformer"}, "optimizer": {"name": "adamw", "lr": 1e-3}},
    "batch_norm": {"model": NORMALISED, "augment": {"crop_padding": 1, "flip": True}},
    "synchronized": {"model": NORMALISED, "batch_norm": "synchronized", "gradient_accumulation": 3},
    "three devices": {"model": NORMALISED, "devices": {"count": 3}, "gradient_accumulation": 2, "batch_size": 25},
    "bfloat16": {"model": {"preset": "mlp"}, "dtype": "bfloat16"},
    "channels first": {
        "model": {"preset": "lenet"},
        "channels_last": False,
        "strategies": ["single", "scratch", "ddp"],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_strategy_equals_one_device(case: str, tmp_path: Path) -> None:
    spec = {**BASE, **CASES[case]}
    result = run_fresh(spec, tmp_path).result
    assert result.skipped == []
    for of in spec["strategies"]:
        found = [c for c in result.checks if c.of == of]
        assert {c.name for c in found} == {"equal_to_single", "replicas_equal"}
        assert all(c.passed for c in found), [c for c in found if not c.passed]
    assert {f.reason for f in result.figures if f.name == "scaling_efficiency"} == {"too few rounds to tell"}
    distances = {f.of: f.value for f in result.figures if f.name == "distance_from_whole_batch"}
    if case == "batch_norm":
        assert distances["ddp"] is not None and distances["ddp"] > 0.01, "it is shown, not hidden"
    elif case == "synchronized":
        assert "ddp" not in distances, "the unsplit batch is what it equals"


def test_shares_may_be_empty(tmp_path: Path) -> None:
    """A batch of 1, and a last one of 1 in 4: the second of two devices has nothing to do."""
    data = {"synthetic": {"samples": 9, "shape": [1, 8, 8], "classes": 10}}
    strategies = ["scratch", "ddp", "fsdp", "parameter_server"]
    spec = {**BASE, "model": NORMALISED, "dataset": data, "strategies": strategies, "batch_size": 4, "check_steps": 3}
    result = run_fresh(spec, tmp_path).result
    assert result.skipped == []
    assert all(c.passed for c in result.checks), [c for c in result.checks if not c.passed]
    seen = {f.of: f.value for f in result.figures if f.name == "samples_seen"}
    assert seen == dict.fromkeys(strategies, 9)
