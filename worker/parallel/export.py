"""The trained model as a download: TorchScript in eval mode, proven by a process that knows nothing of Torchstone.

    exporter.export("ddp.safetensors", "ddp.pt")         # in a process of its own: "script", or "trace"
    loader.ask("run", program=scoring_program("ddp.pt", 1024), inputs="test.pt", output="answers.npz", ...)
    right_answers(Path("answers.npz"), labels)

Scripting comes first, since it keeps control flow and any batch size; what cannot be scripted is traced on two samples
and must give the same for all. The loader runs the very lines that a stranger would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file
from torch import nn

from worker import models
from worker.contestants.torchscript import on_purpose
from worker.parallel.setting import Setting


class Exporter:
    """Turns weights into programs; in a process of its own, on the CPU."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def export(self, weights: str, file: str) -> str:
        """Write the model with the weights in one file to another; how that was done."""
        spec = self.setting.spec
        module = models.build(spec.fitted_model, spec.seed)
        module.load_state_dict(load_file(weights))
        module.eval().requires_grad_(False)
        scripted, how = self._scripted(module)
        with on_purpose():
            torch.jit.save(scripted, file)
        return how

    def _scripted(self, module: nn.Module) -> tuple[Any, str]:
        jit: Any = torch.jit
        try:
            with on_purpose():
                return jit.script(module), "script"
        except Exception as scripting:
            x = models.inputs(self.setting.spec.fitted_model, 2, self.setting.spec.seed)
            try:
                with on_purpose():
                    return jit.trace(module, x, check_trace=False), "trace"
            except Exception as tracing:
                raise ValueError(f"neither scripted ({scripting}) nor traced ({tracing})") from tracing


def scoring_program(file: str, batch_size: int) -> str:
    """Lines of Python that load `file` and make `output`, the predicted classes of the samples `x`."""
    return (
        "import torch\n\n"
        f'model = torch.jit.load({file!r}, map_location="cpu")\n'
        "with torch.inference_mode():\n"
        f"    output = torch.cat([model(part).argmax(1) for part in x.split({batch_size})])\n"
    )


def right_answers(output: Path, labels: list[int]) -> int:
    """How many of the predicted classes in a .npz file are right."""
    with np.load(output) as archive:
        return int((archive["arr_0"] == np.array(labels)).sum())


def merge(files: list[Path], into: Path) -> None:
    """One file with every weight that the ranks wrote, as the lowest rank that has it wrote it."""
    weights: dict[str, Any] = {}
    for file in files:
        weights = {**load_arrays(file), **weights}
        file.unlink()
    save_arrays(weights, into)
