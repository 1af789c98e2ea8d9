"""What lives in a contestant's process: one model, built in one way, and the stopwatch on it.

    contestant = Contestant.start("script", lambda: Runner(setting, WAYS[Variant.script], cache), cores, threads)
    contestant.ask("build", name="script")
    contestant.ask("output", key="1", file="/.../script-1.npz")
    contestant.ask("turn", key="1", calls=30, ...)           # from Stopwatch

Everything is built in normal mode and called in one mode for all contestants: inference mode, or, with `grad`, one
training step (gradients dropped, forward, backward) in training mode with the random layers at rest.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchstone.errors import InvalidModel
from worker.contestants import inductor
from worker.contestants.probes import probes as probe_inputs
from worker.contestants.ways import Inputs, Runnable, Setting, Way
from worker.measure import cuda, roofline
from worker.measure.contestant import explain
from worker.measure.resting import Resting
from worker.measure.stopwatch import nothing_to_wait_for

T = TypeVar("T")
Mode = Callable[[], AbstractContextManager[Any]]


class Runner(Resting):
    """One model built in one way; `name` is the variant's, the file's too.

    The keys of its calls are measuring points: a batch size ("64"), or one with cold caches ("64/cold").
    """

    def __init__(self, setting: Setting, way: Way, cache: Path) -> None:
        on_cuda = setting.device.type == "cuda"
        super().__init__(torch.cuda.synchronize if on_cuda else nothing_to_wait_for, _mode(setting))
        self.setting, self.way, self.cache = setting, way, cache
        self.runnable: Runnable | None = None
        self.timed: dict[str, Inputs] = {}
        """The very tensors that the timed calls are made with, by batch size."""

    def build(self, name: str) -> dict[str, Any]:
        """Build, save, and load again. Tells seconds of each step, and the file's name and size where there is one."""
        was_warm = self.way.disk_cache and self.cache.exists() and any(self.cache.iterdir())
        if self.way.disk_cache:
            inductor.use_cache(self.cache)
        built, facts = self._built(self.setting)
        facts["was_warm"] = was_warm
        if self.way.suffix and self.way.save and self.way.load:
            artifact, save, load = self.setting.folder / f"{name}{self.way.suffix}", self.way.save, self.way.load
            timed = artifact.with_stem(f"training-{name}") if self.setting.grad else artifact
            _, facts["save_s"] = _timed(lambda: save(built, timed))
            if self.setting.grad:  # what is offered is for inference, whatever is timed
                save(self._built(replace(self.setting, grad=False))[0], artifact)
            built, facts["load_s"] = _timed(lambda: load(timed, self.setting))
            facts |= {"file": artifact.name, "artifact_bytes": artifact.stat().st_size}
        self.runnable = built
        for batch_size in self.setting.batch_sizes:
            key = str(batch_size)
            self.timed[key] = self.setting.inputs(batch_size)
            self.calls[key] = self.calls[f"{key}/cold"] = _call(built, self.timed[key], self.setting)
            self.between[f"{key}/cold"] = cache_flusher(self.setting.device)
        if self.way.lazy:
            facts["build_s"] += self.first_call(str(self.setting.batch_sizes[0]))
        return facts

    def rebuild(self) -> float:
        """Seconds to build once more in this process, which has built it before."""
        return float(self._built(self.setting)[1]["build_s"])

    def output(self, key: str, file: str) -> None:
        """Write what a call returns (with `grad`: the output and every gradient) to `file`, as .npz, in order."""
        assert self.runnable is not None, "built before it is asked"
        self.first_call(key)
        write_output(self.runnable, self.setting.inputs(int(key)), self.setting, Path(file))

    def probe(self, files: dict[str, str], other_shapes: bool) -> dict[str, str]:
        """Write the outputs for the named probes to their files; what each that failed says, by name.

        Other values are written into the tensors that are timed: a form that only remembers what it gave for them
        would be right for every other tensor.
        """
        assert self.runnable is not None, "built before it is asked"
        inputs = probe_inputs(self.setting, other_shapes)
        timed = self.timed[str(self.setting.batch_sizes[0])]
        with torch.no_grad():
            for kept, values in zip(timed, inputs["other_values"], strict=True):
                kept.copy_(values)
        inputs["other_values"] = timed
        return write_probes(self.runnable, self.setting, inputs, files)

    def memory(self, key: str, calls: int = 3) -> dict[str, int]:
        """The most memory that calls held, in a pass of its own: bytes of the process, or of the device."""
        return peak_memory(self.setting, self.mode, self.calls[key], calls)

    def turn(self, key: str, calls: int, settle_s: float, call_s: float) -> list[float]:
        """The stopwatch's turn; on CUDA with a third figure, seconds of as many calls by the device's own clock."""
        took = super().turn(key, calls, settle_s, call_s)
        if self.setting.device.type == "cuda" and key not in self.between:
            with self.mode():
                took.append(cuda.device_seconds(self.calls[key], calls, took[1]))
        return took

    def rest(self) -> float:
        """As Resting does; one thread has no helpers, and looking for them would cost time on every turn."""
        return super().rest() if self.setting.threads > 1 else 0.0

    def compilations(self) -> int:
        """Graphs compiled so far in this process."""
        return inductor.compilations()

    def profile(self, key: str, file: str, calls: int = 5) -> None:
        """Write a torch.profiler trace of some calls (Chrome's trace format) to `file`, in a pass of its own."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.setting.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with self.mode(), torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            for _ in range(calls):
                self.calls[key]()
            self.synchronize()
        profiler.export_chrome_trace(file)

    def facts(self) -> dict[str, Any]:
        """torch's own flags and thread counts, as they hold in this process."""
        return torch_facts(self.setting)

    def _built(self, setting: Setting) -> tuple[Any, dict[str, Any]]:
        if self.way.builds_on_cpu:
            setting = replace(setting, device=torch.device("cpu"))
        model, example = eager_model(setting), setting.inputs(setting.batch_sizes[0])
        built, build_s = _timed(lambda: self.way.build(model, example, setting))
        return built, {"build_s": build_s, "file": None}


class Reference:
    """What is right: eager's output, and that of the same model in float64 on the same input."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def outputs(
        self, eager: dict[str, str], truth: dict[str, str], probes: dict[str, str], loaded: dict[str, str]
    ) -> dict[str, Any]:
        """Write both for every batch size and every probe to the files named by them.

        `loaded` names files for what an exported file is checked with: `inputs` (and `inputs_cpu`) for the first batch
        size, eager's `output` in eval mode, and float64's (`truth`). `probes` in what this returns are those that the
        model takes. Raises InvalidModel with the layer that refused the input.
        """
        model = eager_model(self.setting)
        # In training mode normalisations learn from what they are called with; what is exported has not.
        untaught = copy.deepcopy(model) if self.setting.grad else model
        facts: dict[str, Any] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        }
        for key, file in eager.items():
            with _naming_the_layer(model):
                write_output(model, self.setting.inputs(int(key)), self.setting, Path(file))
        facts["work"] = {key: asdict(self._work(model, int(key))) for key in eager}
        inputs = probe_inputs(self.setting, other_shapes=True)
        write_probes(model, self.setting, inputs, probes)
        facts["probes"] = [name for name, file in probes.items() if Path(file).exists()]
        self._write_for_loaders(untaught, loaded)
        model.double()
        exact = replace(self.setting, dtype=torch.float64)
        for key in eager:
            write_output(model, _doubled(self.setting.inputs(int(key))), exact, Path(truth[key]))
        write_probes(model, exact, {name: _doubled(x) for name, x in inputs.items()}, truth)
        return facts

    def _work(self, model: nn.Module, batch_size: int) -> roofline.Work:
        """What one timed call takes."""
        x = self.setting.inputs(batch_size)
        if self.setting.grad:
            return roofline.training(model, x, roofline.sum_of_outputs)
        return roofline.inference(model, x)

    def _write_for_loaders(self, model: nn.Module, loaded: dict[str, str]) -> None:
        """In eval mode; `model` is in float64 afterwards."""
        setting = replace(self.setting, grad=False)
        x = setting.inputs(setting.batch_sizes[0])
        torch.save(x, loaded["inputs"])
        torch.save(tuple(t.cpu() for t in x), loaded["inputs_cpu"])
        model.eval().requires_grad_(False)
        write_output(model, x, setting, Path(loaded["output"]))
        write_output(model.double(), _doubled(x), replace(setting, dtype=torch.float64), Path(loaded["truth"]))


def eager_model(setting: Setting) -> nn.Module:
    """The model of the spec: same weights in every process, since they come from the seed."""
    model = setting.make_model().to(setting.device, setting.dtype)
    if setting.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train(setting.grad)
    _rest_random_layers(model)
    return model.requires_grad_(setting.grad)


def _rest_random_layers(model: nn.Module) -> None:
    """Dropout passes everything through, so that contestants can be compared."""
    for layer in model.modules():
        if "Dropout" in type(layer).__name__:
            layer.eval()
        if isinstance(layer, nn.MultiheadAttention) and layer.training:
            layer.dropout = 0.0  # a number of its own, no layer


def _doubled(x: Inputs) -> Inputs:
    """The same numbers in float64, not the same draw: what the contestants get was rounded to their type."""
    return tuple(t.double() if t.is_floating_point() else t for t in x)


def write_output(runnable: Runnable, x: Inputs, setting: Setting, path: Path) -> None:
    """The tensors that one call gives, in order, as numpy arrays; bfloat16, which numpy lacks, widened to float32."""
    with _mode(setting)():
        tensors = pytree.tree_leaves(_call(runnable, x, setting)())
    if setting.grad:
        tensors += [p.grad for p in _parameters(runnable) if p.grad is not None]
    wide = [t.detach().float() if t.dtype == torch.bfloat16 else t.detach() for t in tensors if isinstance(t, Tensor)]
    np.savez(path, *(t.cpu().numpy() for t in wide))


def write_probes(
    runnable: Runnable, setting: Setting, inputs: dict[str, Inputs], files: dict[str, str]
) -> dict[str, str]:
    """The outputs for those of `inputs` in `files`, each to its file; what those that failed said, by name."""
    failed = {}
    for name, x in inputs.items():
        if name in files:
            try:
                write_output(runnable, x, setting, Path(files[name]))
            except Exception as error:  # whatever a stranger's model raises is the finding
                failed[name] = explain(error)[1]
    return failed


def peak_memory(setting: Setting, mode: Mode, call: Callable[[], object], calls: int) -> dict[str, int]:
    """`peak_bytes` while `calls` calls ran; `call_bytes`, how much of that was not held before; empty if unknown."""
    on_cuda = setting.device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far becomes what is held now
        except OSError:
            return {}  # a /proc that may not be written to, in some containers: then nothing is known
        before = _resident("VmRSS")
    with mode():
        for _ in range(calls):
            call()
    if on_cuda:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        return {"peak_bytes": peak, "call_bytes": peak - before, "reserved_bytes": torch.cuda.max_memory_reserved()}
    peak = _resident("VmHWM")
    return {"peak_bytes": peak, "call_bytes": max(0, peak - before)}


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def cache_flusher(device: torch.device) -> Callable[[], None]:
    """Overwrites more than the last-level cache holds, so that the next call finds nothing of its own there."""
    buffers: list[Tensor] = []

    def flush() -> None:
        if not buffers:
            buffers.append(torch.zeros(2 * last_level_cache_bytes(device) // 4, dtype=torch.float32, device=device))
        buffers[0].add_(1.0)

    return flush


def last_level_cache_bytes(device: torch.device) -> int:
    """Of the device's L2, or of the CPU's largest cache (32 MiB where the system does not tell)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max((int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}[size[-1]] for size in sizes), default=32 << 20)


def torch_facts(setting: Setting) -> dict[str, Any]:
    """torch's flags, threads and devices, as they hold in the process that asks."""
    backends: Any = torch.backends
    facts: dict[str, Any] = {
        "device": setting.device.type,
        "affinity": sorted(os.sched_getaffinity(0)),
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
            "nvml": cuda.facts(os.environ.get("CUDA_VISIBLE_DEVICES")),
            "device_name": properties.name,
            "device_bytes": properties.total_memory,
            "capability": [properties.major, properties.minor],
            "cudnn": backends.cudnn.version(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
            "tf32_cudnn": torch.backends.cudnn.allow_tf32,
        }
    return facts


def _mode(setting: Setting) -> Mode:
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
