"""The data of a job as its ranks see them: global batches as indices, samples by index, all without a DataLoader.

Feed.write(setting)                       # once a job: loads the data set and leaves it as files ...
feed = Feed(setting, rank)                # ... that every rank maps: in memory once, whatever the ranks
for indices in feed.epoch(1):             # the global batches of an epoch, the same on every rank
    x, y = feed.train(indices)            # of the share that a rank takes of them
feed.on(rank=1)                           # where one process has several devices: the same on another of them
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from worker import data
from worker.parallel.forms import device_of
from worker.parallel.setting import Course, Setting

_PARTS = ("x", "y", "x_test", "y_test")


class Feed:
    """One rank's access to the data."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting = setting
        self.device = device_of(setting, rank)
        x, y, x_test, y_test = (_mapped(_path(setting, part)).to(self.device) for part in _PARTS)
        self.x, self.y, self.x_test, self.y_test = x, y, x_test, y_test
        self.change: data.Augmentation | None = None
        self.others: list[Feed] = []
        """Of this process, on other devices."""

    @staticmethod
    def write(setting: Setting) -> data.Data:
        """Load the data set for all. Raises DataMissing where its files are not there or not right."""
        loaded = data.load(setting.spec, setting.data_folders)
        for part in _PARTS:
            np.save(_path(setting, part), getattr(loaded, part).numpy())
        return loaded

    def on(self, rank: int) -> Feed:
        """The same data on the device of another rank of this process; it follows the epochs that this one begins."""
        device = device_of(self.setting, rank)
        if device == self.device:
            return self
        other = copy(self)
        other.device, other.others = device, []
        for part in _PARTS:
            setattr(other, part, getattr(self, part).to(device))
        self.others.append(other)
        return other

    @property
    def samples(self) -> int:
        """To train on."""
        return len(self.y)

    @property
    def test_samples(self) -> int:
        return len(self.y_test)

    def epoch(self, number: int) -> list[Tensor]:
        """The global batches of the epoch with this number, from 1; what augmentation does to them changes with it."""
        spec, batch_size = self.setting.spec, self.setting.batch_size
        order = data.epoch_order(self.samples, number - 1, spec.seed, spec.shuffle)
        if spec.augment is not None:
            change = data.Augmentation(spec.augment, self.samples, number - 1, spec.seed)
            for feed in (self, *self.others):
                feed.change = change
        drop_last = spec.drop_last and batch_size <= self.samples
        return [order[part] for part in data.batches(self.samples, batch_size, drop_last)]

    def first_batches(self, steps: int, course: Course) -> Iterator[Tensor]:
        """The batches of the first `steps` steps, through as many epochs as they take."""
        for epoch in range(1, course.epochs + 1):
            for batch in self.epoch(epoch)[: course.steps_in(epoch)]:
                if steps == 0:
                    return
                yield batch
                steps -= 1

    def train(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples of the training set, on the rank's device and in the layout of the model."""
        here = indices.to(self.device)
        x, y = self.x.index_select(0, here), self.y.index_select(0, here)
        if self.change is not None:
            x = self.change(x, indices)
        return self._laid_out(x), y

    def test(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples of the test set."""
        here = indices.to(self.device)
        return self._laid_out(self.x_test.index_select(0, here)), self.y_test.index_select(0, here)

    def _laid_out(self, x: Tensor) -> Tensor:
        if self.setting.is_channels_last and x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return x


def _path(setting: Setting, part: str) -> Path:
    return setting.folder / f"data-{part}.npy"


def _mapped(path: Path) -> Tensor:
    """A saved array, mapped: its pages are shared by all who read it, and copied by whoever writes."""
    return torch.from_numpy(np.load(path, mmap_mode="c"))
