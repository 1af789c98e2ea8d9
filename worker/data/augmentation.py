"""Random crops and flips of images, as operations on whole batches.

    change = Augmentation(Augment(crop_padding=2, flip=True), samples=60_000, epoch=3, seed=0)
    x = change(data.x[indices], indices)

What happens to a sample depends on its index, the epoch and the seed alone: not on the batch that it is in, nor on the
device that the batch is on. So all strategies train on the same images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchstone.training import Augment
from worker.data.order import stream


class Augmentation:
    """The changes of one epoch, drawn for all samples at once."""

    def __init__(self, augment: Augment | None, samples: int, epoch: int, seed: int) -> None:
        self.padding = augment.crop_padding if augment else 0
        self.flips: Tensor | None = None
        self.offsets: Tensor | None = None
        if self.padding:
            generator = stream(seed, "crop", epoch)
            self.offsets = torch.randint(2 * self.padding + 1, (samples, 2), generator=generator)
        if augment and augment.flip:
            self.flips = torch.rand(samples, generator=stream(seed, "flip", epoch)) < 0.5

    def __call__(self, x: Tensor, indices: Tensor) -> Tensor:
        """(batch, channels, height, width) changed; `indices` (batch,) say which samples these are."""
        indices = indices.cpu()
        if self.offsets is not None:
            x = self._crop(x, self.offsets[indices].to(x.device))
        if self.flips is not None:
            x = torch.where(self.flips[indices].to(x.device)[:, None, None, None], x.flip(3), x)
        return x

    def _crop(self, x: Tensor, offsets: Tensor) -> Tensor:
        """A window of the old size out of each padded image, its corner at `offsets` (batch, 2)."""
        batch, channels, height, width = x.shape
        padded = torch.nn.functional.pad(x, [self.padding] * 4)
        rows = offsets[:, 0, None] + torch.arange(height, device=x.device)
        columns = offsets[:, 1, None] + torch.arange(width, device=x.device)
        samples = torch.arange(batch, device=x.device)[:, None, None, None]
        every_channel = torch.arange(channels, device=x.device)[None, :, None, None]
        return padded[samples, every_channel, rows[:, None, :, None], columns[:, None, None, :]]
