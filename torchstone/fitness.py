"""What of a spec cannot run on devices of a type, and what else its author should know: all that needs no machine.

    unfit(spec, "cpu")              # {"cuda_graph": "CUDA graphs need a CUDA device"}
    cautions(spec, "cpu")           # ["cuda_graph will be skipped: CUDA graphs need a CUDA device"]

The worker writes the reasons into `skipped`, `validate_only` tells them before a job exists. What depends on the host
itself (a compiler, a package, its caches) only the worker can tell.
"""

from __future__ import annotations

from torchstone.facts import steps_of
from torchstone.models import LayersModel
from torchstone.specs import BaseSpec, HardwareSpec, JitSpec, Probe, TrainSpec, Variant
from torchstone.training import Scaling, Strategy

_OF_GPUS = (Probe.host_device, Probe.device_device)
_FROZEN = (Variant.script_frozen, Variant.trace_frozen, Variant.script_optimized, Variant.trace_optimized)
_BY_DATA = (Strategy.scratch, Strategy.ddp, Strategy.fsdp, Strategy.parameter_server, Strategy.replicate)
"""Strategies that split a batch over the devices."""
_WITHOUT_GRADIENTS = (Variant.export_aot, Variant.onnxruntime, Variant.cuda_graph)

NO_CUDA = "this job holds no CUDA device"
ONE_DEVICE = "collectives need two devices or more, and this job holds one"


def unfit(spec: BaseSpec, device_type: str) -> dict[str, str]:
    """The variants, strategies or probes of `spec` that cannot run on "cuda" or "cpu" devices, each with its reason."""
    if isinstance(spec, JitSpec):
        found = {variant.value: _unfit_variant(spec, variant, device_type) for variant in spec.variants}
    elif isinstance(spec, TrainSpec):
        found = {strategy.value: _unfit_strategy(spec, strategy, device_type) for strategy in spec.strategies}
    elif isinstance(spec, HardwareSpec):
        found = {probe.value: _unfit_probe(spec, probe, device_type) for probe in spec.probes}
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
        found.append(f"nothing of it can run on {device_type} devices")
    if isinstance(spec, TrainSpec):
        found += _small_shares(spec)
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


def _unfit_probe(spec: HardwareSpec, probe: Probe, device_type: str) -> str | None:
    if probe in _OF_GPUS and device_type != "cuda":
        return NO_CUDA
    # With isolation: host all devices of the host are measured, however many those are.
    few = spec.isolation != "host" and spec.devices.count < 2
    return ONE_DEVICE if probe is Probe.collectives and few else None


def _small_shares(spec: TrainSpec) -> list[str]:
    """Where a full batch, split over the devices, leaves one of them too little."""
    devices, batch = spec.devices.count, spec.batch_size
    if Scaling.strong not in spec.scaling or not set(spec.strategies) & set(_BY_DATA):
        return []
    if batch < devices:
        return [f"of {devices} devices {devices - batch} would have no sample: batch_size is {batch}"]
    flat = any(step.layer.type == "BatchNorm1d" and len(step.output_shape) == 1 for step in steps_of(spec.fitted_model))
    if flat and spec.batch_norm == "per_device" and batch < 2 * devices * spec.gradient_accumulation:
        return [
            f"a device would have one sample at a time, of which BatchNorm1d has no statistics: batch_size is {batch}"
        ]
    return []


def _unfit_strategy(spec: TrainSpec, strategy: Strategy, device_type: str) -> str | None:
    if strategy is Strategy.replicate and device_type != "cuda":
        return "nn.DataParallel is for GPUs: on CPU devices PyTorch's falls through to the plain model on one"
    if strategy is Strategy.pipeline and isinstance(spec.model, LayersModel):
        layers, devices = len(spec.model.layers), spec.devices.count
        return too_few_layers(layers, devices) if layers < devices else None
    return None


def too_few_layers(layers: int, devices: int) -> str:
    """Why a model cannot be cut into stages."""
    return f"{layers} layers cannot be cut into {devices} stages"
