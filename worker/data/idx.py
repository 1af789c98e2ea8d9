"""The IDX format of MNIST and its kin: a header with the type and the sizes, then the numbers.

images = tensor(read("fashion_mnist", "train-images", folder))      # (60000, 28, 28), uint8
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

_UINT8 = 0x08


def tensor(payload: bytes) -> Tensor:
    """The numbers of an IDX file of unsigned bytes, in its own shape. Raises ValueError where it is none."""
    if len(payload) < 4 or payload[:2] != b"\0\0":
        raise ValueError("this is no IDX file: it must begin with two zero bytes")
    kind, dimensions = payload[2], payload[3]
    if kind != _UINT8:
        raise ValueError(
            f"the IDX file holds numbers of type {kind:#04x}; only unsigned bytes ({_UINT8:#04x}) are read"
        )
    start = 4 + 4 * dimensions
    if len(payload) < start:
        raise ValueError(f"the IDX file ends within its header of {start} bytes")
    shape = struct.unpack(f">{dimensions}I", payload[4:start])
    if len(payload) - start != math.prod(shape):
        raise ValueError(
            f"the IDX file holds {len(payload) - start} bytes where {list(shape)} needs {math.prod(shape)}"
        )
    return torch.from_numpy(np.frombuffer(payload, np.uint8, offset=start).reshape(shape).copy())
