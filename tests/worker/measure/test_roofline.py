"""Work is counted as arithmetic says, and set against the ceilings of as many cores."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchstone.ceilings import Ceilings
from worker.measure import roofline
from worker.measure.roofline import Work

ROWS = [
    {"of": "memory", "name": "stream_triad", "at": {"cores": 1}, "value": 10e9, "unit": "B/s"},
    {
        "of": "gemm",
        "name": "gemm",
        "at": {"cores": 1, "dtype": "float32", "device_type": "cpu"},
        "value": 80e9,
        "unit": "FLOP/s",
    },
]
CEILINGS = Ceilings({"ceilings": [{**row, "job": "j", "grade": "valid"} for row in ROWS]})
WHERE = {"dtype": "float32", "device_type": "cpu", "cores": 1}


def test_a_linear_layer_is_counted_by_hand() -> None:
    layer, x = nn.Linear(64, 32, bias=False), torch.zeros(8, 64)
    product = 2 * 8 * 64 * 32
    assert roofline.inference(layer, (x,)) == Work(product, 4 * (64 * 32 + 8 * 64 + 8 * 32))
    # The gradient of the weights is one more product; the input needs none.
    trained = roofline.training(layer, (x,), roofline.sum_of_outputs)
    assert trained.flop == 2 * product and trained.bytes > 4 * 3 * 64 * 32
    assert layer.weight.grad is None and layer.weight.device.type == "cpu"


def test_what_does_not_run_on_shapes_alone_has_a_reason() -> None:
    class Chooses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    found = roofline.inference(Chooses(), (torch.ones(2),))
    assert found.reason and found.flop == 0
    figure = roofline.point("eager", {}, found, 1.0, CEILINGS, **WHERE)  # type: ignore[arg-type]
    assert figure.value is None and figure.reason == found.reason


@pytest.mark.parametrize(
    ("work", "value", "bound"),
    [(Work(40, 1), 0.5, "compute"), (Work(40, 40), 4.0, "memory")],
    ids=["compute", "memory"],
)
def test_the_point_lies_under_the_lower_of_two_roofs(work: Work, value: float, bound: str) -> None:
    figure = roofline.point("eager", {}, work, 1e-9, CEILINGS, **WHERE)  # type: ignore[arg-type]
    told = figure.model_extra or {}
    assert figure.value == pytest.approx(value) and told["bound"] == bound
    assert told["flop_fraction"] == pytest.approx(0.5) and told["ceiling_job"] == "j"


def test_without_a_report_the_achieved_rates_stay() -> None:
    figure = roofline.point("eager", {}, Work(4, 2), 2.0, Ceilings(None), **WHERE)  # type: ignore[arg-type]
    told = figure.model_extra or {}
    assert figure.value is None and "no hardware report" in (figure.reason or "")
    assert (told["flop_per_s"], told["bytes_per_s"], told["flop_fraction"]) == (2.0, 1.0, None)
