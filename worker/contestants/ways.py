"""What every way of running a model has in common; `table.WAYS` lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchstone.models import ModelSpec

Inputs = tuple[Tensor, ...]
Runnable = Callable[..., Any]
"""Takes the model's inputs, returns its output: a module, or a loaded program."""


@dataclass(frozen=True)
class Setting:
    """What all contestants of a job share, equal for every one of them: the model, its input, the mode."""

    model: ModelSpec
    seed: int
    dtype: torch.dtype
    device: torch.device
    batch_sizes: tuple[int, ...]
    grad: bool
    folder: Path


@dataclass(frozen=True)
class Way:
    """One way of running a model.

    `build` makes the runnable form from an eager module and an example input, and raises what torch raises where it
    cannot. `suffix`, `save` and `load` are there where the form can be written to a file: the file, loaded again,
    is what is timed, and an artifact. `unavailable` tells why it cannot run here or with this setting.
    """

    build: Callable[[nn.Module, Inputs, Setting], Runnable]
    suffix: str | None = None
    save: Callable[[Any, Path], None] | None = None
    load: Callable[[Path, Setting], Runnable] | None = None
    unavailable: Callable[[Setting], str | None] = lambda setting: None
    media_type: str = "application/octet-stream"


def as_it_is(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """Eager: operation after operation, by Python."""
    return model
