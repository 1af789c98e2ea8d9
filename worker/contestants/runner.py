"""What lives in a contestant's process: one model, built in one way, and the stopwatch on it.

    contestant = Contestant.start("script", lambda: Runner(setting, WAYS[Variant.script]), cores, threads)
    contestant.ask("build", name="script")
    contestant.ask("output", key="1", file="/.../script-1.npz")
    contestant.ask("turn", key="1", calls=30, ...)           # from Stopwatch

Everything is built in normal mode and called in one mode for all contestants: inference mode, or, with `grad`, one
training step (gradients dropped, forward, backward) in training mode with the random layers at rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchstone.errors import InvalidModel
from worker import models
from worker.contestants.ways import Inputs, Runnable, Setting, Way
from worker.measure.contestant import explain
from worker.measure.stopwatch import Stopwatch, nothing_to_wait_for

T = TypeVar("T")


class Runner(Stopwatch):
    """One model built in one way; `name` is the variant's, the file's too."""

    def __init__(self, setting: Setting, way: Way) -> None:
        on_cuda = setting.device.type == "cuda"
        super().__init__(torch.cuda.synchronize if on_cuda else nothing_to_wait_for, _mode(setting))
        self.setting, self.way = setting, way
        self.runnable: Runnable | None = None

    def build(self, name: str) -> dict[str, Any]:
        """Build, save, and load again. Tells seconds of each step, and the file's name and size where there is one."""
        model, example = eager_model(self.setting), inputs(self.setting, self.setting.batch_sizes[0])
        built, build_s = _timed(lambda: self.way.build(model, example, self.setting))
        facts: dict[str, Any] = {"build_cold_s": build_s, "file": None}
        if self.way.suffix and self.way.save and self.way.load:
            path, save, load = self.setting.folder / f"{name}{self.way.suffix}", self.way.save, self.way.load
            _, facts["save_s"] = _timed(lambda: save(built, path))
            built, facts["load_s"] = _timed(lambda: load(path, self.setting))
            facts |= {"file": path.name, "artifact_bytes": path.stat().st_size}
        self.runnable = built
        for batch_size in self.setting.batch_sizes:
            self.calls[str(batch_size)] = _call(built, inputs(self.setting, batch_size), self.setting)
        return facts

    def rebuild(self) -> float:
        """Seconds to build once more in this process, which has built it before."""
        model, example = eager_model(self.setting), inputs(self.setting, self.setting.batch_sizes[0])
        return _timed(lambda: self.way.build(model, example, self.setting))[1]

    def output(self, key: str, file: str) -> None:
        """Write what a call returns (with `grad`: the output and every gradient) to `file`, as .npz, in order."""
        assert self.runnable is not None, "built before it is asked"
        self.first_call(key)
        write_output(self.runnable, inputs(self.setting, int(key)), self.setting, Path(file))

    def facts(self) -> dict[str, Any]:
        """torch's own flags and thread counts, as they hold in this process."""
        return torch_facts(self.setting)


class Reference:
    """What is right: eager's output, and that of the same model in float64 on the same input."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def outputs(self, eager: dict[str, str], truth: dict[str, str]) -> dict[str, Any]:
        """Write both for every batch size to the files named by it. Raises InvalidModel with the layer that refused."""
        model = eager_model(self.setting)
        facts = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        }
        for batch_size in self.setting.batch_sizes:
            x = inputs(self.setting, batch_size)
            with _naming_the_layer(model):
                write_output(model, x, self.setting, Path(eager[str(batch_size)]))
        model.double()
        for batch_size in self.setting.batch_sizes:
            exact = tuple(t.double() if t.is_floating_point() else t for t in inputs(self.setting, batch_size))
            write_output(model, exact, self.setting, Path(truth[str(batch_size)]))
        return facts


def eager_model(setting: Setting) -> nn.Module:
    """The model of the spec: same weights in every process, since they come from the seed."""
    model = models.build(setting.model, setting.seed).to(setting.device, setting.dtype)
    model.train(setting.grad)
    for layer in model.modules():
        if "Dropout" in type(layer).__name__:
            layer.eval()
    return model.requires_grad_(setting.grad)


def inputs(setting: Setting, batch_size: int) -> Inputs:
    """The input of the spec: the same in every process."""
    return models.inputs(setting.model, batch_size, setting.seed, setting.dtype, setting.device)


def write_output(runnable: Runnable, x: Inputs, setting: Setting, path: Path) -> None:
    """The tensors that one call gives, in order, as numpy arrays; bfloat16, which numpy lacks, widened to float32."""
    with _mode(setting)():
        tensors = pytree.tree_leaves(_call(runnable, x, setting)())
    if setting.grad:
        tensors += [p.grad for p in _parameters(runnable) if p.grad is not None]
    wide = [t.detach().float() if t.dtype == torch.bfloat16 else t.detach() for t in tensors if isinstance(t, Tensor)]
    np.savez(path, *(t.cpu().numpy() for t in wide))


def torch_facts(setting: Setting) -> dict[str, Any]:
    """torch's flags, threads and devices, as they hold in the process that asks."""
    backends: Any = torch.backends
    facts: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": backends.mkldnn.is_available() and backends.mkldnn.enabled,
        "mkl": backends.mkl.is_available(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "flush_denormal": float(torch.tensor(1e-310, dtype=torch.float64) * 1.0) == 0.0,
        "grad": setting.grad,
        "inference_mode": not setting.grad,
        "training": setting.grad,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "cuda": torch.version.cuda,
        "git_version": torch.version.git_version,
    }
    if setting.device.type == "cuda":
        properties = torch.cuda.get_device_properties(setting.device)
        facts |= {
            "device_name": properties.name,
            "device_bytes": properties.total_memory,
            "capability": [properties.major, properties.minor],
            "cudnn": backends.cudnn.version(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
            "tf32_cudnn": torch.backends.cudnn.allow_tf32,
        }
    return facts


def _mode(setting: Setting) -> Callable[[], AbstractContextManager[Any]]:
    return nullcontext if setting.grad else torch.inference_mode


def _call(runnable: Runnable, x: Inputs, setting: Setting) -> Callable[[], object]:
    """One timed call, with no arguments."""
    if not setting.grad:
        return partial(runnable, *x)
    parameters = _parameters(runnable)

    def training_step() -> object:
        for parameter in parameters:
            parameter.grad = None
        output = runnable(*x)
        leaves = pytree.tree_leaves(output)
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
        return output

    return training_step


def _parameters(runnable: Runnable) -> list[Tensor]:
    return list(runnable.parameters()) if isinstance(runnable, nn.Module) else []


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start_s = time.perf_counter()
    done = work()
    return done, time.perf_counter() - start_s


class _naming_the_layer:
    """Turns an error of a model's forward pass into InvalidModel that names the layer it came from."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.trail = model, list[str]()

    def __enter__(self) -> None:
        self.hooks = [
            layer.register_forward_pre_hook(lambda layer, _, name=name: self.trail.append(f"{name} ({layer})"))
            for name, layer in self.model.named_modules()
            if name and not list(layer.children())
        ]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for hook in self.hooks:
            hook.remove()
        if isinstance(error, Exception):
            why, reason = explain(error)
            if why == "error":
                layer = f" at layer {self.trail[-1]}" if self.trail else ""
                raise InvalidModel(f"the model does not run on its input{layer}: {reason}") from error
