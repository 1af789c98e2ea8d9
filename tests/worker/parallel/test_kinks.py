"""Units that rounding could put on the other side of their activation's kink, and only those, are turned over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from worker.parallel.kinks import OtherSide, has_kinks


def gradient(layer: nn.Module, x: list[float], share: float) -> list[float]:
    leaf = torch.tensor(x, requires_grad=True)
    with OtherSide(share):
        out: Tensor = layer(leaf * 1)
        out.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return [round(value, 6) for value in leaf.grad.tolist()]


@pytest.mark.parametrize(
    ("layer", "kink", "below", "above"),
    [
        (nn.ReLU(), 0.0, 0.0, 1.0),
        (nn.ReLU(inplace=True), 0.0, 0.0, 1.0),
        (nn.LeakyReLU(0.25), 0.0, 0.25, 1.0),
        (nn.ReLU6(), 6.0, 1.0, 0.0),
        (nn.Hardtanh(), -1.0, 0.0, 1.0),
        (nn.Threshold(0.0, 0.0), 0.0, 0.0, 1.0),
        (nn.Hardshrink(0.5), 0.5, 0.0, 1.0),
        (nn.Softshrink(0.5), -0.5, 1.0, 0.0),
    ],
)
def test_what_is_close_to_a_kink_has_the_gradient_of_the_other_side(
    layer: nn.Module, kink: float, below: float, above: float
) -> None:
    assert has_kinks(nn.Sequential(layer))
    inputs = [kink - 1e-6, kink + 1e-6, kink - 0.2, kink + 0.2, 4.0]
    plain, turned = (gradient(layer, inputs, share) for share in (0.0, 1e-5))
    assert plain[:4] == [below, above, below, above]
    assert turned[:4] == [above, below, below, above]
    assert turned[4] == plain[4]


def test_a_smooth_model_has_none() -> None:
    assert not has_kinks(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.GELU()))
