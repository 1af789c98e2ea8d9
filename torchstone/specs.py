"""What a client may ask for: one class per experiment kind, and the union of them at the foot.

    spec = parse_spec({"kind": "jit", "model": {"preset": "mlp"}})      # every default filled in
    spec.devices.count                                                   # 1

Unknown fields are refused; every number is finite. Shapes are checked against layers without torch
(`torchstone.models`), so a wrong spec is refused when it is POSTed and not when a worker gets to it.

Adding a kind: one class, its name in `KINDS` and `Spec`, one file in `worker/workloads/`. What all kinds share is in
`torchstone.base_spec`, the larger kinds have modules of their own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from torchstone.asynchrony import AsyncSpec
from torchstone.base_spec import OUTSIDE_BUDGET, BaseSpec, DeviceRequest, Priority
from torchstone.diagnostics import SleepSpec
from torchstone.errors import FieldError, InvalidRequest
from torchstone.models import ModelSpec
from torchstone.parallel import ParallelSpec
from torchstone.strict import each_once, near, refusal
from torchstone.training import TrainSpec

__all__ = [
    "EXAMPLES",
    "KINDS",
    "SPEC_VERSION",
    "AsyncSpec",
    "BaseSpec",
    "DeviceRequest",
    "HardwareSpec",
    "JitSpec",
    "ParallelSpec",
    "Priority",
    "Probe",
    "SleepSpec",
    "Spec",
    "TrainSpec",
    "Variant",
    "kinds",
    "parse_spec",
]

SPEC_VERSION = 1


class Variant(StrEnum):
    """A way of running the same model."""

    eager = "eager"
    script = "script"
    trace = "trace"
    script_frozen = "script_frozen"
    trace_frozen = "trace_frozen"
    script_optimized = "script_optimized"
    trace_optimized = "trace_optimized"
    compile = "compile"
    compile_reduce_overhead = "compile_reduce_overhead"
    compile_max_autotune = "compile_max_autotune"
    export_aot = "export_aot"
    onnxruntime = "onnxruntime"
    cuda_graph = "cuda_graph"


class JitSpec(BaseSpec):
    """Imperative against symbolic: which way of running this model is fastest here, and is it still right."""

    kind: Literal["jit"]
    model: ModelSpec
    variants: list[Annotated[Variant, Field(strict=False)]] = Field(
        default_factory=lambda: [Variant.eager, Variant.script, Variant.trace], min_length=1, max_length=16
    )
    baseline: Annotated[Variant, Field(strict=False)] = Field(
        Variant.eager, description="The variant that the others' speed-ups refer to."
    )
    batch_sizes: list[Annotated[int, Field(ge=1, le=65536)]] = Field(
        default_factory=lambda: [1], min_length=1, max_length=16
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    calls: int | None = Field(
        None, ge=1, le=10_000_000, description="A fixed number of timed calls, as the book does; null = by precision."
    )
    ci_half_width: float = Field(0.01, gt=0, lt=1, description="Stop when every comparison's CI is this narrow.")
    budget_s: float = Field(20, gt=0, le=86400, description=f"Seconds that measuring may take in all. {OUTSIDE_BUDGET}")
    grad: bool = Field(False, description="Time a training step (forward and backward) instead of inference.")
    channels_last: bool = Field(False, description="Images and convolution weights with their channels innermost.")
    dynamic_batch: bool = Field(False, description="Compile and export for any batch size, not for each by itself.")
    profile: bool = Field(False, description="Keep a torch.profiler trace of each variant, taken in a pass of its own.")
    cache: Literal["hot", "cold", "both"] = Field(
        "hot", description="cold = the last-level cache (GPU: L2) is overwritten before each timed call."
    )

    @model_validator(mode="after")
    def _baseline_takes_part(self) -> Self:
        if self.baseline not in self.variants:
            raise refusal([(("baseline",), f"{self.baseline.value!r} is not among the variants")])
        each_once(self, "variants", "batch_sizes")
        return self


class Probe(StrEnum):
    """A part of the machine that is measured by itself."""

    memory = "memory"
    cache = "cache"
    vector = "vector"
    gemm = "gemm"
    storage = "storage"
    process = "process"
    network = "network"
    host_device = "host_device"
    device_device = "device_device"
    collectives = "collectives"


class HardwareSpec(BaseSpec):
    """What this machine really gives: bandwidths, latencies and rates of its parts, the ceilings of every later result.

    With `isolation: host`, its default, it measures all that the host's worker owns, whatever `devices` asks for.
    """

    LEAST_BYTES: ClassVar[int] = 512 << 20
    """With less memory its arrays would lie in caches."""

    kind: Literal["hardware"]
    isolation: Literal["auto", "device", "host"] = Field(
        "host", description="host = nobody else runs on the machine meanwhile, and all of its devices are measured"
    )
    probes: list[Annotated[Probe, Field(strict=False)]] = Field(
        default_factory=lambda: list(Probe), min_length=1, max_length=len(Probe), description="What to measure."
    )
    budget_s: float = Field(
        60,
        gt=0,
        le=3600,
        description="Seconds that all probes together should take; each does its least even where this is over.",
    )

    @model_validator(mode="after")
    def _each_probe_once(self) -> Self:
        each_once(self, "probes")
        return self


# The closed set of kinds: a class in both.
KINDS: dict[str, type[JitSpec] | type[AsyncSpec] | type[ParallelSpec] | type[TrainSpec] | type[HardwareSpec]] = {
    "jit": JitSpec,
    "async": AsyncSpec,
    "parallel": ParallelSpec,
    "train": TrainSpec,
    "hardware": HardwareSpec,
}
Spec = Annotated[JitSpec | AsyncSpec | ParallelSpec | TrainSpec | HardwareSpec, Field(discriminator="kind")]
AnySpec = JitSpec | AsyncSpec | ParallelSpec | TrainSpec | HardwareSpec | SleepSpec

EXAMPLES: dict[str, dict[str, Any]] = {
    "jit": {
        "kind": "jit",
        "name": "the chapter's MLP",
        "model": {"preset": "mlp"},
        "variants": ["eager", "script", "trace"],
        "batch_sizes": [1],
        "calls": 1000,
    },
    "async": {
        "kind": "async",
        "name": "who waits for whom",
        "size": 256,
        "repeats": 10,
        "parts": ["numpy_vs_torch", "dispatch", "barriers", "graph"],
        "devices": {"type": "auto", "count": 2},
        "budget_s": 6,
    },
    "parallel": {
        "kind": "parallel",
        "name": "two devices at once, small",
        "size": 256,
        "repeats": 10,
        "devices": {"type": "auto", "count": 2},
        "parts": ["concurrency", "overlap", "streams", "schedule"],
        "budget_s": 10,
    },
    "train": {
        "kind": "train",
        "name": "handwritten digits, by hand and by library",
        "model": {"preset": "mlp"},
        "dataset": {"name": "digits"},
        "strategies": ["single", "scratch", "ddp"],
        "devices": {"type": "auto", "count": 2},
        "epochs": 5,
        "batch_size": 64,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    },
    "hardware": {"kind": "hardware", "name": "what this machine gives"},
}


DIAGNOSTIC_KINDS: dict[str, type[SleepSpec]] = {"sleep": SleepSpec}
"""Not experiments: accepted only where TORCHSTONE_DIAGNOSTICS is set, and shown nowhere."""


def kinds(diagnostics: bool) -> dict[str, type[AnySpec]]:
    """Every kind that is accepted."""
    return {**KINDS, **DIAGNOSTIC_KINDS} if diagnostics else {**KINDS}


def parse_spec(body: Any, *, diagnostics: bool = False) -> AnySpec:
    """The spec that `body` (decoded JSON) describes, with its defaults filled in; see `kinds` for `diagnostics`.

    Raises InvalidRequest with one pointer and sentence per fault.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", errors=[{"pointer": "", "detail": "not an object"}])
    kind = body.get("kind")
    accepted = kinds(diagnostics)
    if not isinstance(kind, str) or kind not in accepted:
        known = ", ".join(accepted)
        detail = "the field is required" if "kind" not in body else f"unknown kind {str(kind)[:80]!r}"
        raise InvalidRequest(
            f"{detail}; the kinds are: {known}",
            errors=[{"pointer": "/kind", "detail": f"{detail}; the kinds are: {known}"}],
        )
    try:
        return accepted[kind].model_validate(body)  # by its class: a union's own errors would point at /train/epochs
    except ValidationError as error:
        errors = [_field_error(accepted[kind], e) for e in error.errors(include_url=False)]
        first = errors[0]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise InvalidRequest(f"{first['pointer'] or 'the body'}: {first['detail']}{more}", errors=errors) from None


def _field_error(spec: type[BaseModel], error: ErrorDetails) -> FieldError:
    location, message, code = error["loc"], error["msg"], error["type"]
    pointer = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location)
    if code == "extra_forbidden":
        message = f"unknown field{near(str(location[-1]), _fields_at(spec, location[:-1]))}"
    elif code == "missing":
        message = "the field is required"
    elif code in ("model_type", "dict_type"):  # pydantic's own sentence names classes of ours
        message = "Input should be an object"
    return {"pointer": pointer, "detail": message.removeprefix("Value error, ")}


def _fields_at(spec: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The fields of the object that lies there in a spec; none where that may be one of several."""
    found: Any = spec
    for part in location:
        field = found.model_fields.get(part)
        found = field and field.annotation
        if not (isinstance(found, type) and issubclass(found, BaseModel)):
            return []
    return list(found.model_fields)
