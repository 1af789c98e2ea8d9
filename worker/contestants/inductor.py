"""TorchInductor: the model compiled when it is first called (torch.compile), or ahead of time into a package (.pt2).

    compiled = compile_with("default")(model, (x,), setting)       # compiles at its first call
    export_aot(model, (x,), setting)                               # a package's path: save copies, load runs it

Compiling happens in the contestant's own process (no pool of compile workers that would linger beside the stopwatch),
against a cache folder that belongs to this variant and job: cold means empty.

The compiler's own modules take seconds to import: only functions that need them do.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from worker.contestants.ways import Inputs, Runnable, Setting

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def use_cache(folder: Path) -> None:
    """Have everything that this process compiles kept in `folder`, and compiled by this process itself."""
    import torch._dynamo.config
    import torch._inductor.config as inductor

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    config: Any = inductor
    config.compile_threads = 1
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = 64  # beyond it, a new batch size would silently run as eager


def no_compiler() -> str | None:
    """Why nothing can be compiled for CPUs here; None where it can."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name):
        return None
    return f"torch.compile needs a C++ compiler, and {name!r} is not on PATH (Debian: apt install g++, or set CXX)"


def unavailable(setting: Setting) -> str | None:
    """As `no_compiler`, for a contestant."""
    return no_compiler() if setting.device.type == "cpu" else None


def draw_as_eager() -> None:
    """Have compiled dropout draw from torch's own generators, the masks that the plain model would draw."""
    import torch._inductor.config as inductor

    config: Any = inductor
    config.fallback_random = True


def compile_with(mode: str) -> Callable[[nn.Module, Inputs, Setting], Runnable]:
    """torch.compile in one of its modes. Without `dynamic`, each batch size is compiled for by itself."""

    def build(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
        compiled: Runnable = torch.compile(model, mode=mode, dynamic=setting.dynamic)
        return compiled

    return build


def export_aot(model: nn.Module, example: Inputs, setting: Setting) -> Path:
    """torch.export, then AOTInductor: native code and weights in one package for this device and instruction set."""
    import torch._inductor

    program = export(model, setting)
    path = setting.folder / f"aot-{os.getpid()}.pt2"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated", FutureWarning)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return path


def export(model: nn.Module, setting: Setting) -> ExportedProgram:
    """The model as an exported program; for any batch size where several are asked for (from an example of two at
    least: an example of one would be taken as a constant)."""
    import torch.export

    if not setting.several_shapes:
        return torch.export.export(model, setting.inputs(setting.batch_sizes[0]))
    example = setting.inputs(max(2, setting.batch_sizes[0]))
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(model, example, dynamic_shapes=({0: batch},) * len(example))


def save_package(package: Any, path: Path) -> None:
    """Move the package to `path`."""
    shutil.move(package, path)


def load_package(path: Path, setting: Setting) -> Runnable:
    """The program in a package."""
    import torch._inductor

    loaded: Runnable = torch._inductor.aoti_load_package(str(path))
    return loaded


def compilations() -> int:
    """Graphs that this process has compiled so far: a difference while the clock ran is a recompilation."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0
