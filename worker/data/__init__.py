"""The data sets that specs can name, as tensors: loaded once, batched by index.

    data = load(spec, bench.data_folders)                        # DataMissing where files are not there or not right
    for epoch in range(spec.epochs):
        order = epoch_order(len(data.y), epoch, spec.seed, spec.shuffle)
        for part in batches(len(data.y), spec.batch_size, spec.drop_last):
            x, y = data.x[order[part]], data.y[order[part]]

Everything random comes from generators of its own, so that data, order and augmentation are the same on every rank and
in every strategy, and repeat with the seed.
"""

from __future__ import annotations

from worker.data.augmentation import Augmentation
from worker.data.loading import Data, load
from worker.data.order import batches, epoch_order, stream, stream_seed

__all__ = ["Augmentation", "Data", "batches", "epoch_order", "load", "stream", "stream_seed"]
