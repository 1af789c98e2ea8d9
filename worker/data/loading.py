"""From a spec to tensors in memory: read or made, scaled, resized.

    data = load(parse_spec({"kind": "train", "model": {"preset": "lenet"}}), folders=())
    data.x.shape, data.y.shape, data.classes         # (1442, 1, 28, 28), (1442,), 10

Named images come from 0 to 1, and with `normalize` get the mean 0 and the deviation 1 of their training set. Synthetic
data are of that kind already; inline data are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchstone import datasets
from torchstone.data_specs import Dataset, InlineDataset, NamedDataset, Synthetic, SyntheticDataset
from torchstone.facts import facts
from torchstone.training import TrainSpec
from worker.data import idx
from worker.data.order import stream

_FASHION_MNIST = (0.2860, 0.3530)
"""Mean and deviation of its training images, from 0 to 1."""
_RESIZED_AT_ONCE = 4096


@dataclass(frozen=True)
class Data:
    """A data set in memory: x (n, *shape) float32, or int64 for an Embedding; y (n,) int64, from 0 to classes - 1.

    Pixels from 0 to 1 became (pixel - mean) / deviation.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    mean: float = 0.0
    deviation: float = 1.0

    @property
    def bytes(self) -> int:
        """What all of it takes."""
        return sum(t.numel() * t.element_size() for t in (self.x, self.y, self.x_test, self.y_test))


def load(spec: TrainSpec, folders: Sequence[str | Path]) -> Data:
    """The data that `spec` names, of the shape that its model takes.

    Raises DataMissing where its files are in none of `folders` or are not what they should be.
    """
    integers = facts(spec.fitted_model).input_dtype == "int64"
    data = _load(spec.dataset, folders, spec.normalize, torch.int64 if integers else torch.float32)
    x, x_test = (_fit(images, spec.image_size, spec.input_shape) for images in (data.x, data.x_test))
    return replace(data, x=x, x_test=x_test)


def _load(dataset: Dataset, folders: Sequence[str | Path], normalize: bool, dtype: torch.dtype) -> Data:
    if isinstance(dataset, SyntheticDataset):
        return _synthetic(dataset.synthetic, dataset.test_samples)
    if isinstance(dataset, InlineDataset):
        return _inline(dataset, dtype)
    return _digits(normalize) if dataset.name == "digits" else _fashion_mnist(dataset, folders, normalize)


def _digits(normalize: bool) -> Data:
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as archive:
        x, y, x_test, y_test = (torch.from_numpy(archive[name]) for name in ("x", "y", "x_test", "y_test"))
    images, test = x[:, None].float() / 16, x_test[:, None].float() / 16
    if not normalize:
        return Data(images, y.long(), test, y_test.long(), 10)
    mean, deviation = images.mean(), images.std()
    images, test = (images - mean) / deviation, (test - mean) / deviation
    return Data(images, y.long(), test, y_test.long(), 10, float(mean), float(deviation))


def _fashion_mnist(dataset: NamedDataset, folders: Sequence[str | Path], normalize: bool) -> Data:
    folder = datasets.locate(dataset.name, folders)
    mean, deviation = _FASHION_MNIST if normalize else (0.0, 1.0)
    parts = {}
    for part in ("train", "test"):
        images = idx.tensor(datasets.read(dataset.name, f"{part}-images", folder))
        labels = idx.tensor(datasets.read(dataset.name, f"{part}-labels", folder))
        parts[part] = (images[:, None].float().div_(255).sub_(mean).div_(deviation), labels.long())
    return Data(*parts["train"], *parts["test"], dataset.classes, mean, deviation)


def _synthetic(made: Synthetic, test_samples: int) -> Data:
    """Every class about as often; numbers of mean 0 and deviation 1 over all classes."""
    centres = torch.randn(made.classes, *made.shape, generator=stream(made.seed, "centres"))
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    for name, samples in (("train", made.samples), ("test", test_samples)):
        generator = stream(made.seed, name)
        y = torch.randperm(samples, generator=generator) % made.classes
        x = torch.randn(samples, *made.shape, generator=generator)
        x.mul_(made.noise).add_(centres[y]).div_(math.sqrt(1 + made.noise**2))
        parts[name] = (x, y)
    return Data(*parts["train"], *parts["test"], classes=made.classes)


def _inline(dataset: InlineDataset, dtype: torch.dtype) -> Data:
    given = dataset.inline
    x, y = torch.tensor(given.x, dtype=dtype), torch.tensor(given.y)
    if given.x_test is None:
        return Data(x, y, x, y, given.classes)
    return Data(x, y, torch.tensor(given.x_test, dtype=dtype), torch.tensor(given.y_test), given.classes)


def _fit(x: Tensor, image_size: tuple[int, int] | None, shape: tuple[int, ...]) -> Tensor:
    """Resized where asked, bilinearly (with antialiasing where that makes them smaller), and of `shape` a sample."""
    if image_size is not None:
        resized = [
            functional.interpolate(x[start : start + _RESIZED_AT_ONCE], image_size, mode="bilinear", antialias=True)
            for start in range(0, len(x), _RESIZED_AT_ONCE)
        ]
        x = torch.cat(resized)
    return x.reshape(len(x), *shape).contiguous()
