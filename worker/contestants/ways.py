"""What every way of running a model has in common; `table.WAYS` lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchstone.specs import JitSpec
from worker import models
from worker.bench import Bench

Inputs = tuple[Tensor, ...]
Runnable = Callable[..., Any]
"""Takes the model's inputs, returns its output: a module, or a loaded program."""


@dataclass(frozen=True)
class Setting:
    """What all contestants of a job share, equal for every one of them: the model, its input, the mode.

    `make_model()` gives the eager module on the CPU in float32, the same weights each time; `make_inputs(batch_size,
    seed, dtype, device)` its input. `dynamic`: the client wants forms that take any batch size.
    """

    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[int, int, torch.dtype, torch.device], Inputs]
    folder: Path
    device: torch.device
    seed: int = 0
    dtype: torch.dtype = torch.float32
    batch_sizes: tuple[int, ...] = (1,)
    threads: int = 1
    grad: bool = False
    dynamic: bool = False
    channels_last: bool = False

    def inputs(self, batch_size: int, seed: int | None = None) -> Inputs:
        """The input of the spec, on the device."""
        x = self.make_inputs(batch_size, self.seed if seed is None else seed, self.dtype, self.device)
        return tuple(t.to(memory_format=self.memory_format) if t.dim() == 4 else t for t in x)

    @property
    def several_shapes(self) -> bool:
        """Whether a program that is built once must take more than one batch size."""
        return self.dynamic or len(self.batch_sizes) > 1

    @property
    def memory_format(self) -> torch.memory_format:
        """How 4-dimensional tensors lie in memory."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


def setting_of(spec: JitSpec, bench: Bench) -> Setting:
    """What all contestants of this job share."""
    return Setting(
        make_model=lambda: models.build(spec.model, spec.seed),
        make_inputs=lambda batch_size, seed, dtype, device: models.inputs(spec.model, batch_size, seed, dtype, device),
        folder=bench.folder,
        seed=spec.seed,
        dtype=getattr(torch, spec.dtype),
        device=torch.device("cuda:0" if bench.devices[0].type == "cuda" else "cpu"),
        batch_sizes=tuple(spec.batch_sizes),
        threads=spec.threads or len(bench.cores),
        grad=spec.grad,
        dynamic=spec.dynamic_batch,
        channels_last=spec.channels_last,
    )


Build = Callable[[nn.Module, Inputs, Setting], Any]
"""Makes the form that runs, or the one that is saved."""


@dataclass(frozen=True)
class Way:
    """One way of running a model.

    `build` makes the runnable form from an eager module and an example input, and raises what torch raises where it
    cannot. `suffix`, `save` and `load` are there where the form can be written to a file: the file, loaded again,
    is what is timed, and an artifact. `unavailable` tells what this machine lacks for it; what the spec and the type of
    device rule out is told by `torchstone.fitness`.
    """

    build: Build
    suffix: str | None = None
    save: Callable[[Any, Path], None] | None = None
    load: Callable[[Path, Setting], Runnable] | None = None
    unavailable: Callable[[Setting], str | None] = lambda setting: None
    builds_on_cpu: bool = False
    """The file is made on the CPU, so that a machine without a GPU can load it."""
    lazy: bool = False
    """The first call does the building."""
    disk_cache: bool = False
    """A second process builds faster, from what the first left on disk."""
    shapes: Literal["any", "guarded", "fixed_unless_dynamic"] = "any"
    """Which other batch sizes it takes: any; any, rebuilt by itself when it meets one; those it was built for."""

    def takes_other_shapes(self, setting: Setting) -> bool:
        """Whether the built form claims to be right for batch sizes that it was not built with."""
        return self.shapes == "any" or (self.shapes == "fixed_unless_dynamic" and setting.several_shapes)


def as_it_is(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """Eager: operation after operation, by Python."""
    return model
