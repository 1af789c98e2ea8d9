"""The networks that specs can name: the chapter's mlp, lenet and resnet18, and a small transformer.

    PRESETS["lenet"]((1, 28, 28), 10)(torch.randn(256, 1, 28, 28)).shape      # (256, 10)

Each takes the shape of a sample and the number of classes; which ones they have unless told stands in
`torchstone.models`. All of them can be scripted, traced and exported, and take any batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchstone.models import Preset
from torchstone.shapes import Shape


def mlp(shape: Shape, classes: int) -> nn.Module:
    """The "hybridize" experiment's: 164,482 parameters on 512 numbers; what is not flat is flattened first."""
    return nn.Sequential(
        *([nn.Flatten()] if len(shape) > 1 else []),
        nn.Linear(math.prod(shape), 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def lenet(shape: Shape, classes: int) -> nn.Module:
    """The "training from scratch" experiment's LeNet, with ReLU and average pooling: 129,068 parameters on 1x28x28."""
    channels, height, width = shape
    after = [((size - 2) // 2 - 4) // 2 for size in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 20, kernel_size=3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * math.prod(after), 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut past them; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, kernel_size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + self.shortcut(x))


def resnet18(shape: Shape, classes: int) -> nn.Module:
    """The "concise" experiment's ResNet-18 with a small stem: 11,175,818 parameters on one channel, 10 classes."""
    blocks: list[nn.Module] = []
    in_channels = 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Residual(in_channels, channels, stride), Residual(channels, channels, 1)]
        in_channels = channels
    return nn.Sequential(
        nn.Conv2d(shape[0], 64, kernel_size=3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


class Attention(nn.Module):
    """Self-attention of several heads: (batch, tokens, width) to the same shape.

    Its four projections are layers of their own and the number of heads is taken from their width, so that a device
    may hold some of the heads only.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        y = nn.functional.scaled_dot_product_attention(query, key, value)
        mixed: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) as (batch, heads, tokens, head_width)."""
        return x.view(x.size(0), x.size(1), -1, self.head_width).transpose(1, 2)


class Block(nn.Module):
    """A transformer's block: attention, then two linear layers, each after a LayerNorm and past a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, hidden)
        self.activation = nn.GELU()
        self.linear2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        change: Tensor = self.linear2(self.activation(self.linear1(self.norm2(x))))
        return x + change


class Tokens(nn.Module):
    """A sample as (tokens, width): the rows of an image, each with its place added as sines and cosines."""

    def __init__(self, tokens: int, features: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(features, width)
        angles = torch.arange(tokens)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("position", torch.stack([angles.sin(), angles.cos()], 2).flatten(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:  # images: (batch, channels, rows, columns)
            x = x.transpose(1, 2).flatten(2)
        placed: Tensor = self.embedding(x) + self.position
        return placed


class MeanToken(nn.Module):
    """The mean over a sample's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def transformer(shape: Shape, classes: int) -> nn.Module:
    """A small classifier, 2 blocks of width 64 with 4 heads: 69,578 parameters on 1x28x28."""
    tokens, features = (shape[1], shape[0] * shape[2]) if len(shape) == 3 else shape
    return nn.Sequential(
        Tokens(tokens, features, width=64),
        Block(width=64, heads=4, hidden=128),
        Block(width=64, heads=4, hidden=128),
        nn.LayerNorm(64),
        MeanToken(),
        nn.Linear(64, classes),
    )


PRESETS: dict[Preset, Callable[[Shape, int], nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "resnet18": resnet18,
    "transformer": transformer,
}
