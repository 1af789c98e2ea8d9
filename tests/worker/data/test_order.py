"""Orders, batches and augmentation: every sample once, another order each epoch, the same on every rank."""

from __future__ import annotations

import pytest
import torch

from torchstone.training import Augment
from worker.data import Augmentation, batches, epoch_order, stream, stream_seed


def test_orders_differ_by_epoch_and_repeat_by_seed() -> None:
    orders = [epoch_order(100, epoch, seed=3, shuffle=True) for epoch in range(3)]
    for order in orders:
        assert order.sort().values.tolist() == list(range(100))
    assert len({tuple(order.tolist()) for order in orders}) == 3
    torch.manual_seed(99)  # whatever a rank has drawn before
    torch.rand(7)
    assert torch.equal(epoch_order(100, 1, seed=3, shuffle=True), orders[1])
    assert not torch.equal(epoch_order(100, 1, seed=4, shuffle=True), orders[1])


def test_without_shuffle_samples_stay_as_they_stand() -> None:
    assert epoch_order(5, epoch=7, seed=1, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("n", "batch_size"), [(10, 4), (8, 4), (3, 4), (1, 1), (0, 4)])
def test_batches_cover_every_sample_once(n: int, batch_size: int, drop_last: bool) -> None:
    parts = [torch.arange(n)[part] for part in batches(n, batch_size, drop_last)]
    seen = [index for part in parts for index in part.tolist()]
    assert seen == list(range(n - n % batch_size if drop_last else n))
    assert all(len(part) == batch_size for part in parts[:-1])
    assert all(len(part) for part in parts)


def test_streams_are_told_apart_by_name() -> None:
    seeds = {
        stream_seed(0, "dropout", 0),
        stream_seed(0, "dropout", 1),
        stream_seed(1, "dropout", 0),
        stream_seed(0, 1),
    }
    assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    assert torch.equal(torch.rand(3, generator=stream(5, "a")), torch.rand(3, generator=stream(5, "a")))


def test_crops_are_windows_of_the_padded_image() -> None:
    x = torch.arange(1.0, 1 + 3 * 2 * 5 * 4).view(3, 2, 5, 4)
    change = Augmentation(Augment(crop_padding=2), samples=3, epoch=0, seed=0)
    assert change.offsets is not None
    padded = torch.nn.functional.pad(x, [2] * 4)
    for image, (row, column), before in zip(change(x, torch.arange(3)), change.offsets.tolist(), padded, strict=True):
        assert torch.equal(image, before[:, row : row + 5, column : column + 4])


def test_flips_mirror_half_of_the_images() -> None:
    x = torch.rand(400, 1, 2, 3)
    changed = Augmentation(Augment(flip=True), samples=400, epoch=0, seed=0)(x, torch.arange(400))
    mirrored = (changed == x.flip(3)).flatten(1).all(1)
    kept = (changed == x).flatten(1).all(1)
    assert torch.equal(mirrored, ~kept)
    assert 150 < mirrored.sum() < 250


def test_a_samples_change_depends_on_nothing_but_itself_the_epoch_and_the_seed() -> None:
    x = torch.rand(8, 3, 6, 6)
    both = Augment(crop_padding=1, flip=True)
    change = Augmentation(both, samples=8, epoch=2, seed=5)
    whole = change(x, torch.arange(8))
    shard = torch.tensor([6, 1, 3])
    assert torch.equal(change(x[shard], shard), whole[shard])
    assert torch.equal(Augmentation(both, 8, 2, 5)(x, torch.arange(8)), whole)
    assert not torch.equal(Augmentation(both, 8, 3, 5)(x, torch.arange(8)), whole)
    assert not torch.equal(Augmentation(both, 8, 2, 6)(x, torch.arange(8)), whole)


def test_without_augmentation_nothing_changes() -> None:
    x = torch.rand(2, 1, 3, 3)
    assert Augmentation(None, samples=2, epoch=0, seed=0)(x, torch.arange(2)) is x
