"""The chapter's networks, by name: mlp (512 numbers, 2 classes), lenet and resnet18 (1x28x28, 10 classes).

    PRESETS["lenet"]()(torch.randn(256, 1, 28, 28)).shape      # (256, 10)

All of them can be scripted, traced and exported, and take any batch size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    """The "hybridize" experiment's: 164,482 parameters."""
    return nn.Sequential(
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 2),
    )


def lenet() -> nn.Module:
    """The "training from scratch" experiment's LeNet, with ReLU and average pooling: 129,068 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
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


def resnet18() -> nn.Module:
    """The "concise" experiment's ResNet-18 with a small stem: 11,175,818 parameters."""
    blocks: list[nn.Module] = []
    in_channels = 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Residual(in_channels, channels, stride), Residual(channels, channels, 1)]
        in_channels = channels
    return nn.Sequential(
        nn.Conv2d(1, 64, kernel_size=3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


PRESETS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "lenet": lenet, "resnet18": resnet18}
