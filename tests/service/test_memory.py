"""The least memory that a job takes, known before it runs."""

from __future__ import annotations

from typing import Any

import pytest

from service.fleet import memory_bytes
from torchstone.facts import memory_estimate_bytes
from torchstone.models import PresetModel
from torchstone.specs import parse_spec

DIGITS = 4 * 64 * 1797
MLP = PresetModel(preset="mlp", input_shape=(1, 8, 8), classes=10)


def train(**changes: Any) -> int:
    return memory_bytes(parse_spec({"kind": "train", "model": {"preset": "mlp"}, "devices": {"count": 2}, **changes}))


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"strategies": ["single", "ddp"], "batch_size": 64}, 64),
        ({"strategies": ["ddp"], "batch_size": 64}, 32),
        ({"strategies": ["ddp"], "batch_size": 64, "gradient_accumulation": 4}, 8),
        ({"strategies": ["pipeline"], "batch_size": 64, "microbatches": 16}, 4),
        ({"strategies": ["single"], "batch_size": 100_000}, 1442),
        ({"strategies": ["ddp"], "batch_size": 1}, 1),
    ],
)
def test_a_training_holds_its_data_its_weights_and_a_share_of_the_batch(changes: dict[str, Any], share: int) -> None:
    assert train(**changes) == DIGITS + memory_estimate_bytes(MLP, share, "float32", grad=True)


def test_a_data_set_that_no_host_holds_is_seen() -> None:
    huge = {"synthetic": {"samples": 10_000_000, "shape": [3, 28, 28], "classes": 10}}
    assert train(dataset=huge) > 4 * 10_000_000 * 3 * 28 * 28


def test_asynchrony_holds_its_matrices() -> None:
    spec = parse_spec({"kind": "async", "size": 2000, "parts": ["dispatch"]})
    assert memory_bytes(spec) == 3 * 2000 * 2000 * 4


def test_the_products_of_a_parallel_job_are_counted() -> None:
    spec = parse_spec({"kind": "parallel", "parts": ["concurrency"], "devices": {"count": 2}})
    assert memory_bytes(spec) >= 2 * 50 * 4000 * 4000 * 4
