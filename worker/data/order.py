"""In which order samples are visited, and the streams of random numbers that are told apart by name.

epoch_order(5, epoch=0, seed=7, shuffle=True)     # a permutation of 0 .. 4; another in epoch 1
batches(10, 4, drop_last=False)                   # [slice(0, 4), slice(4, 8), slice(8, 10)]
stream(7, "dropout", rank)                        # a generator of this rank's own
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def stream_seed(seed: int, *names: str | int) -> int:
    """A seed for one purpose: the same for the same names, unrelated to that of any other."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *names))).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def stream(seed: int, *names: str | int) -> torch.Generator:
    """A generator for one purpose, on the CPU; see `stream_seed`."""
    return torch.Generator().manual_seed(stream_seed(seed, *names))


def epoch_order(n: int, epoch: int, seed: int, shuffle: bool) -> Tensor:
    """(n,) int64: the samples of an epoch in the order of their visit; as they stand without `shuffle`."""
    if not shuffle:
        return torch.arange(n)
    return torch.randperm(n, generator=stream(seed, "order", epoch))


def batches(n: int, batch_size: int, drop_last: bool) -> list[slice]:
    """Where each batch lies within an epoch's order; the last may be short, or left out."""
    return [
        slice(start, min(start + batch_size, n))
        for start in range(0, n, batch_size)
        if start + batch_size <= n or not drop_last
    ]
