"""Passports: the proof that an exported file works without Torchstone, and all that a stranger needs to use it.

    loader = Contestant.start("loader", CleanLoader, cores, threads)
    loader.ask("run", program=loader_program("script.pt"), folder=..., inputs="inputs.pt", output="loaded.npz")
    passport(...)                                              # what NAME.passport.json holds

The loader is a process in which no module of Torchstone is loaded or can be imported: it runs the very lines that the
passport offers, on the file as it will be downloaded, and its output is compared with eager's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchstone.facts import facts
from torchstone.specs import JitSpec, Variant
from worker.measure.equality import Equality

OURS = ("torchstone", "service", "worker")
_LOADERS = {
    ".pt": """\
import torch

model = torch.jit.load({name!r}, map_location="cpu")
with torch.inference_mode():
    output = model(x)
""",
    ".pt2": """\
import torch

model = torch._inductor.aoti_load_package({name!r})
with torch.inference_mode():
    output = model(x)
""",
    ".onnx": """\
import onnxruntime

session = onnxruntime.InferenceSession({name!r}, providers=["CPUExecutionProvider"])
(output,) = session.run(None, {{session.get_inputs()[0].name: x.numpy()}})
""",
}


def loader_program(name: str) -> str:
    """Lines of Python that load the file `name` and make `output` of `x`."""
    return _LOADERS[Path(name).suffix].format(name=name)


def passport(
    path: Path, spec: JitSpec, variant: Variant, check: Equality, host: dict[str, Any], flags: list[str]
) -> dict[str, Any]:
    """What is known of the file at `path`: hash, origin, the check's numbers, what speaks against it, a loader."""
    native = path.suffix == ".pt2"
    model = facts(spec.model)
    dtype = model.input_dtype if model.input_dtype == "int64" else spec.dtype
    return {
        "passport": 1,
        "artifact": path.name,
        "bytes": path.stat().st_size,
        "sha256": sha256(path),
        "variant": variant.value,
        "format": {".pt": "TorchScript", ".pt2": "AOTInductor package", ".onnx": "ONNX"}[path.suffix],
        "mode": "eval",
        "inputs": [{"shape": ["batch", *model.input_shape], "dtype": dtype}],
        "made_by": {
            "torch": host["libraries"].get("torch"),
            "onnxruntime": host["libraries"].get("onnxruntime") if path.suffix == ".onnx" else None,
            "python": host["python"],
            "system": host["system"],
            "seed": spec.seed,
        },
        "needs": {
            # Native code runs on the kind of machine that it was compiled on; the others run wherever torch does.
            "machine": platform.machine() if native else None,
            "isa": host["torch"]["cpu_capability"] if native else None,
            "device": host["torch"]["device"] if native else "any",
        },
        "check": {
            "process": "no module of Torchstone loaded or importable; ran the loader below",
            "against": "eager",
            **vars(check),
        },
        "loader": loader_program(path.name),
        "notes": _NOTES[path.suffix],
        "flags": flags,
    }


_NOTES = {
    ".pt": [
        "A TorchScript file is a program: load it only from where you trust.",
        "TorchScript is deprecated in PyTorch 2.13 and unsupported on Python 3.14: prefer export_aot for new work.",
    ],
    ".pt2": ["The package holds native code for one kind of machine: load it only from where you trust."],
    ".onnx": [],
}


def sha256(path: Path) -> str:
    """The file's hash in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class CleanLoader:
    """Lives in a process of its own, from which it removes every trace of Torchstone first."""

    def __init__(self) -> None:
        forget_torchstone()

    def run(self, program: str, folder: str, inputs: str, output: str) -> list[str]:
        """Run `program` in `folder` with `x` from `inputs` (torch.save of a tuple); write its `output` to a .npz file.

        Returns the names of Torchstone's modules that are loaded after that: none, or the proof is void.
        """
        import numpy as np
        import torch

        (x,) = torch.load(inputs)
        with contextlib.chdir(folder):
            names: dict[str, Any] = {"x": x}
            exec(compile(program, "passport", "exec"), names)
        made = names["output"]
        leaves = made if isinstance(made, (tuple, list)) else [made]
        tensors = [torch.as_tensor(leaf).cpu() for leaf in leaves]
        np.savez(output, *(t.float().numpy() if t.dtype == torch.bfloat16 else t.numpy() for t in tensors))
        return [name for name in sys.modules if name.partition(".")[0] in OURS]


class _Refuse:
    """An import hook that knows nothing of Torchstone."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name.partition(".")[0] in OURS:
            raise ModuleNotFoundError(f"No module named {name!r} in this process", name=name)


def forget_torchstone() -> None:
    """Unload every module of Torchstone from this process, and refuse to load one again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    home = Path(__file__).resolve().parents[2]
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != home]
    sys.meta_path.insert(0, _Refuse())
    os.environ.pop("PYTHONPATH", None)
