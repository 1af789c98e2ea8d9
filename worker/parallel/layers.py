"""Layers computed another way than torch's own, with the same weights: equal, and on CPUs faster.

    use_faster_layers(module)          # in place; names and shapes of the weights stay

They change the order of sums, nothing else; every job proves its strategies' first steps equal to the plain model's.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

Pair = tuple[int, int]


class OneChannelConv2d(nn.Conv2d):
    """A convolution of one channel as one matrix product: (pixels, kernel) by (kernel, channels).

    oneDNN's own is slow there, above all backward: LeNet's first takes 44 ms of one core where this takes 12. The
    product comes out with its channels innermost, as the layers after it want it.
    """

    def __init__(self, plain: nn.Conv2d) -> None:
        size, stride, padding = (cast(Pair, value) for value in (plain.kernel_size, plain.stride, plain.padding))
        super().__init__(1, plain.out_channels, size, stride, padding, bias=plain.bias is not None)
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1, height, width) to (batch, channels, ...), channels innermost in memory."""
        height, width = cast(Pair, self.padding)
        if height or width:
            x = nn.functional.pad(x, (width, width, height, height))
        windows = x[:, 0]
        for dim, size, stride in zip((1, 2), self.kernel_size, self.stride, strict=True):
            windows = windows.unfold(dim, size, stride)
        # A row for each number of the kernel, each a copy of long runs; both products are fast on such a tall matrix.
        patches = windows.permute(3, 4, 0, 1, 2).flatten(2).flatten(0, 1)
        weight = self.weight.flatten(1).t().contiguous()  # else autograd takes a product for its gradient that is slow
        y = patches.t() @ weight if self.bias is None else torch.addmm(self.bias, patches.t(), weight)
        return y.view(*windows.shape[:3], self.out_channels).permute(0, 3, 1, 2)

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Whether this can take the place of `layer`."""
        return (
            type(layer) is nn.Conv2d
            and layer.in_channels == 1
            and layer.dilation == (1, 1)
            and layer.padding_mode == "zeros"
            and isinstance(layer.padding, tuple)
        )


def use_faster_layers(module: nn.Module) -> None:
    """Replace, in `module`, the layers that have a faster equal."""
    for name, child in module.named_children():
        if OneChannelConv2d.fits(child):
            setattr(module, name, OneChannelConv2d(cast(Any, child)))
        else:
            use_faster_layers(child)
