"""ONNX Runtime, where it is installed (the extra `onnx`): the model exported to ONNX and run by another engine.

    save(build(model, (x,), setting), Path("onnxruntime.onnx"))
    load(Path("onnxruntime.onnx"), setting)(x)

Its threads do not spin between calls: they would slow whoever has the next turn.
"""

from __future__ import annotations

import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from worker.contestants.ways import Inputs, Runnable, Setting

_NEEDED = ("onnx", "onnxscript", "onnxruntime")


def unavailable(setting: Setting) -> str | None:
    """What it lacks here."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    return f"not installed here: {', '.join(missing)} (pip install 'torchstone[onnx]')" if missing else None


def build(model: nn.Module, example: Inputs, setting: Setting) -> Any:
    """The model as an ONNX program."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    if setting.several_shapes:
        example = setting.inputs(max(2, setting.batch_sizes[0]))
    shapes = ({0: torch.export.Dim("batch", min=1)},) * len(example) if setting.several_shapes else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="onnxscript|onnx_ir|torch.onnx")
        return torch.onnx.export(model, example, dynamo=True, dynamic_shapes=shapes, verbose=False)


def save(program: Any, path: Path) -> None:
    """Write it as one file."""
    program.save(str(path), external_data=False)


def load(path: Path, setting: Setting) -> Runnable:
    """A session on the setting's device and threads; tensors in, tensors out."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = setting.threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    wanted = "CUDAExecutionProvider" if setting.device.type == "cuda" else "CPUExecutionProvider"
    if wanted not in onnxruntime.get_available_providers():
        raise RuntimeError(f"this ONNX Runtime has no {wanted}")
    session = onnxruntime.InferenceSession(str(path), options, providers=[wanted])
    names = [entry.name for entry in session.get_inputs()]

    def call(*inputs: Tensor) -> list[Tensor]:
        arrays = {name: x.numpy(force=True) for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in session.run(None, arrays)]

    return call
