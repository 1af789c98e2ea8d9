"""Work is counted as arithmetic says, and set against the ceilings of as many cores."""

from __future__ import annotations

import subprocess
import sys

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
    assert trained.flop == 2 * product and trained.bytes > 4 * 2 * 64 * 32
    assert layer.weight.grad is None
    assert roofline.inference(*roofline.on_shapes(layer, (x,))) == roofline.inference(layer, (x,))


def test_it_counts_what_torchs_own_counter_does_and_imports_no_compiler() -> None:
    program = """
import sys, torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from worker.measure import roofline
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
x = torch.randn(2, 1, 8, 8)
ours = roofline.training(net, (x,), roofline.sum_of_outputs).flop
assert "torch._dynamo" not in sys.modules
with FlopCounterMode(display=False) as theirs:
    net(x).sum().backward()
assert ours == theirs.get_total_flops() > 0, (ours, theirs.get_total_flops())
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_attention_is_counted_though_torch_fuses_it() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    tokens, width = 6, 16
    products = tokens * width * (4 * width + 2 * 32) + 2 * tokens * tokens * width
    assert roofline.inference(layer, (torch.zeros(1, tokens, width),)).flop == 2 * products


def test_what_does_not_run_on_shapes_alone_has_a_reason() -> None:
    class Chooses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    found = roofline.inference(*roofline.on_shapes(Chooses(), (torch.ones(2),)))
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
    assert ("caches or fusion" in told.get("note", "")) == (value > 1), "more than all of a ceiling needs a word"


def test_without_a_report_the_achieved_rates_stay() -> None:
    figure = roofline.point("eager", {}, Work(4, 2), 2.0, Ceilings(None), **WHERE)  # type: ignore[arg-type]
    told = figure.model_extra or {}
    assert figure.value is None and "no hardware report" in (figure.reason or "")
    assert (told["flop_per_s"], told["bytes_per_s"], told["flop_fraction"]) == (2.0, 1.0, None)
