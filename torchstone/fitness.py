"""What of a spec cannot run on devices of a type, and what else its author should know: all that needs no machine.

    unfit(spec, "cpu")              # {"cuda_graph": "CUDA graphs need a CUDA device"}
    cautions(spec, "cpu")           # ["cuda_graph will be skipped: CUDA graphs need a CUDA device"]

The worker writes the reasons into `skipped`, `validate_only` tells them before a job exists. What depends on the host
itself (a compiler, a package, its caches) only the worker can tell.
"""

from __future__ import annotations

from torchstone.specs import BaseSpec, HardwareSpec, JitSpec, Probe, TrainSpec, Variant
from torchstone.training import Strategy

_OF_GPUS = (Probe.host_device, Probe.device_device)
_FROZEN = (Variant.script_frozen, Variant.trace_frozen, Variant.script_optimized, Variant.trace_optimized)
_WITHOUT_GRADIENTS = (Variant.export_aot, Variant.onnxruntime, Variant.cuda_graph)

NO_CUDA = "this job holds no CUDA device"


def unfit(spec: BaseSpec, device_type: str) -> dict[str, str]:
    """The variants, strategies or probes of `spec` that cannot run on "cuda" or "cpu" devices, each with its reason."""
    if isinstance(spec, JitSpec):
        found = {variant.value: _unfit_variant(spec, variant, device_type) for variant in spec.variants}
    elif isinstance(spec, TrainSpec):
        found = {strategy.value: _unfit_strategy(strategy, device_type) for strategy in spec.strategies}
    elif isinstance(spec, HardwareSpec):
        found = {probe.value: NO_CUDA for probe in spec.probes if probe in _OF_GPUS and device_type != "cuda"}
    else:
        found = {}
    return {name: reason for name, reason in found.items() if reason}


def cautions(spec: BaseSpec, device_type: str) -> list[str]:
    """What will be left out on devices of that type, or in the time that the spec allows: one sentence each."""
    absent = unfit(spec, device_type)
    found = [f"{name} will be skipped: {reason}" for name, reason in absent.items()]
    if isinstance(spec, JitSpec) and spec.baseline in absent:
        found.append(f"the job will fail: its baseline {spec.baseline.value} cannot run")
    elif isinstance(spec, JitSpec | TrainSpec | HardwareSpec) and len(absent) == len(_parts(spec)):
        found.append("nothing of it can run there")
    budget_s = getattr(spec, "budget_s", None)
    if budget_s is not None and spec.timeout_s <= budget_s:
        found.append(f"timeout_s, {spec.timeout_s:g}, would end it before budget_s, {budget_s:g}, is used up")
    return found


def _parts(spec: JitSpec | TrainSpec | HardwareSpec) -> list[str]:
    if isinstance(spec, JitSpec):
        return [variant.value for variant in spec.variants]
    return [part.value for part in (spec.strategies if isinstance(spec, TrainSpec) else spec.probes)]


def _unfit_variant(spec: JitSpec, variant: Variant, device_type: str) -> str | None:
    if variant is Variant.cuda_graph and device_type != "cuda":
        return "CUDA graphs need a CUDA device"
    if variant is Variant.onnxruntime and spec.dtype == "bfloat16":
        return "its inputs go through numpy, which has no bfloat16"
    if spec.grad and variant in _FROZEN:
        return "freezing makes constants of the weights, so there are no gradients to time"
    if spec.grad and variant in _WITHOUT_GRADIENTS:
        return "this form computes no gradients, so it has no training step to time"
    return None


def _unfit_strategy(strategy: Strategy, device_type: str) -> str | None:
    if strategy is Strategy.replicate and device_type != "cuda":
        return "nn.DataParallel is for GPUs: on CPU devices PyTorch's falls through to the plain model on one"
    return None
