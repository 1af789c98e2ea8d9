"""TorchScript: the model as a program of its own, by compiling its source (script) or by recording a run (trace).

    scripted = script(model, (x,), setting)
    save(scripted, Path("script.pt"))
    load(Path("script.pt"), setting)(x)

TorchScript is deprecated in torch 2.13 and unsupported on Python 3.14; its DeprecationWarnings, and only they, are
silenced where it is called on purpose. A module that went through `optimize_for_inference` saves a broken file without
a word, so that form is never saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from worker.contestants.ways import Inputs, Runnable, Setting

NOTICE = (
    "TorchScript (script*, trace*) is deprecated in PyTorch 2.13 and unsupported on Python 3.14; "
    "export_aot and onnxruntime are the ways that have a future."
)
_jit: Any = torch.jit
_passes: Any = torch._C
"""Neither trace and load nor the compiler's passes carry types of their own."""
_MULTIPLY = """graph(%a : Tensor, %b : Tensor):
  %c : Tensor = aten::mul(%a, %b)
  return (%c)"""


def preload() -> None:
    """Have TorchScript read its own libraries (derivatives, built-ins), which takes 50 to 100 ms once per process.

    No tensor is touched, so a process may do this before it forks contestants: none of them then pays for it at its
    first build or call. Further calls cost nothing worth mentioning.
    """
    _passes._jit_pass_create_autodiff_subgraphs(torch._C.parse_ir(_MULTIPLY), 1)
    with on_purpose():
        torch.jit.freeze(torch.jit.script(nn.Sequential(nn.ReLU())).eval())


@contextmanager
def on_purpose() -> Iterator[None]:
    """Silences what torch says of TorchScript's age, and nothing else."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch\\.jit\\.", DeprecationWarning)
        yield


def script(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """Compile the model's source. Control flow on data survives; Python that the compiler cannot read is an error."""
    with on_purpose():
        scripted: Runnable = torch.jit.script(model)
    return scripted


def trace(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """Record one run on `example`. Control flow on data is frozen as it went in that run."""
    with on_purpose():
        traced: Runnable = _jit.trace(model, example, check_trace=False)
    return traced


def script_frozen(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """Scripted, with the weights as constants."""
    return _freeze(script(model, example, setting))


def trace_frozen(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """Traced, with the weights as constants."""
    return _freeze(trace(model, example, setting))


def script_optimized(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """Scripted, frozen, and rewritten for inference on this device."""
    return _optimize(script_frozen(model, example, setting))


def trace_optimized(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """Traced, frozen, and rewritten for inference on this device."""
    return _optimize(trace_frozen(model, example, setting))


def save(scripted: Any, path: Path) -> None:
    """Write the archive (code and weights)."""
    with on_purpose():
        torch.jit.save(scripted, path)


def load(path: Path, setting: Setting) -> Runnable:
    """The program in `path`, on the setting's device."""
    with on_purpose():
        loaded: Runnable = _jit.load(path, map_location=setting.device)
    return loaded


def _freeze(scripted: Any) -> Runnable:
    with on_purpose():
        frozen: Runnable = torch.jit.freeze(scripted)
    return frozen


def _optimize(frozen: Any) -> Runnable:
    with on_purpose():
        optimized: Runnable = torch.jit.optimize_for_inference(frozen)
    return optimized
