"""Layers that are computed another way give what torch's own give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from worker.parallel.layers import OneChannelConv2d, use_faster_layers


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "bias"),
    [(3, 1, 0, True), (3, 1, 1, False), (5, 2, 2, True), ((2, 3), 1, (1, 0), True)],
)
def test_a_convolution_of_one_channel_as_a_product_is_the_convolution(
    kernel: int | tuple[int, int], stride: int, padding: int | tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 6, kernel, stride, padding, bias=bias)).double()
    ours = nn.Sequential(nn.Conv2d(1, 6, kernel, stride, padding, bias=bias)).double()
    ours.load_state_dict(plain.state_dict())
    use_faster_layers(ours)
    assert isinstance(ours[0], OneChannelConv2d)
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for batch in (4, 1, 0):
        x = torch.randn(batch, 1, 9, 11, dtype=torch.float64)
        inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        outputs = [module(x) for module, x in zip((plain, ours), inputs, strict=True)]
        torch.testing.assert_close(outputs[1], outputs[0])
        for output in outputs:
            output.square().sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
        torch.testing.assert_close(ours[0].weight.grad, plain[0].weight.grad)


def test_other_layers_stay_as_they_are() -> None:
    layers = [nn.Conv2d(2, 4, 3), nn.Conv2d(1, 4, 3, dilation=2), nn.Conv2d(1, 4, 3, padding_mode="reflect", padding=1)]
    layers.append(nn.Conv2d(1, 4, 3, padding="same"))
    module = nn.Sequential(*layers, nn.Sequential(nn.Conv2d(1, 4, 3)))
    use_faster_layers(module)
    assert list(module)[:4] == layers
    assert type(module[4][0]) is OneChannelConv2d
