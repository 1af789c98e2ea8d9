"""One training step of the chapter's two-layer perceptron: its sizes, its data, and its right answer.

    step = Step(features=1000, dtype="float32", seed=0)
    step.weights(), step.batch()          # the same numbers in every process
    step.expected()                       # the weights after the step, in float64

x (256, n) -> W1 (n, n) -> ReLU -> W2 (n, n); the loss is the squared distance to a target, over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.concurrency.products import summed_up

DEVICES, LAYERS = 2, (2, 1)
"""Layers in the order in which backward comes to them."""
BATCH = 256
RATE = 0.1
MOST_FEATURES = 1024


@dataclass(frozen=True)
class Step:
    """The sizes of one training step, and its right answer."""

    features: int
    dtype: str
    seed: int

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def tolerance(self) -> float:
        """Of the weights after one step: they are at most about 0.1."""
        return 1e-5 if self.dtype == "float32" else 1e-12

    @property
    def shared_bytes(self) -> int:
        """Weights and every device's gradients."""
        return (1 + DEVICES) * 2 * self.features**2 * (4 if self.dtype == "float32" else 8)

    def weights(self) -> list[Tensor]:
        """[W1, W2] as each step begins with them, (features, features)."""
        generator = torch.Generator().manual_seed(self.seed)
        return [self._normal(generator, self.features, self.features) / self.features for _ in range(2)]

    def batch(self) -> tuple[Tensor, Tensor]:
        """(x, target) of the whole batch; device r takes the r-th half."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return self._normal(generator, BATCH, self.features), self._normal(generator, BATCH, self.features)

    def expected(self) -> list[Tensor]:
        """[W1, W2] after the step, by autograd on the whole batch in float64."""
        x, target = (part.double() for part in self.batch())
        w1, w2 = (w.double().requires_grad_() for w in self.weights())
        loss = ((torch.relu(x @ w1.T) @ w2.T - target) ** 2).sum() / BATCH
        gradients = torch.autograd.grad(loss, (w1, w2))
        return [(w - RATE * gradient).detach() for w, gradient in zip((w1, w2), gradients, strict=True)]

    def _normal(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=self.torch_dtype)


def compare(weights: list[Tensor], expected: list[Tensor], tolerance: float) -> dict[str, Any]:
    """Whether these are the weights that a step leads to."""
    errors = [float((w.cpu().double() - e).abs().max()) for w, e in zip(weights, expected, strict=True)]
    return summed_up(errors, tolerance)


def features_of(size: int) -> int:
    """The width of the perceptron for products of `size`."""
    return max(16, min(MOST_FEATURES, size // 4))
