"""What a client may ask for: one class per experiment kind, and the union of them at the foot.

    spec = parse_spec({"kind": "jit", "model": {"preset": "mlp"}})      # every default filled in
    spec.devices.count                                                   # 1

Unknown fields are refused; every number is finite. Shapes are checked against layers without torch
(`torchstone.models`), so a wrong spec is refused when it is POSTed and not when a worker gets to it.

Adding a kind: one class here, its name in `Spec`, one file in `worker/workloads/`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from torchstone.errors import FieldError, InvalidRequest
from torchstone.models import ModelSpec
from torchstone.strict import Strict

SPEC_VERSION = 1
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # PostgreSQL takes no NUL, and a table no line break
_LABEL_KEY = re.compile(r"^[a-zA-Z0-9]([a-zA-Z0-9._/-]{0,61}[a-zA-Z0-9])?$")


class Priority(StrEnum):
    """Which of two waiting jobs goes first."""

    low = "low"
    normal = "normal"
    high = "high"


class DeviceRequest(Strict):
    """`count` devices of one type, all at once, on one host."""

    type: Literal["auto", "cuda", "cpu"] = Field("auto", description="auto = cuda where a host has it, else cpu")
    count: int = Field(1, ge=1, le=1024)


class BaseSpec(Strict):
    """What every kind has in common."""

    name: str | None = Field(None, max_length=200, description="A title for people.")
    labels: dict[str, str] = Field(default_factory=dict, max_length=32, description="Filterable in GET /v1/jobs.")
    devices: DeviceRequest = DeviceRequest()
    isolation: Literal["auto", "device", "host"] = Field(
        "auto", description="host = nobody else runs on the machine meanwhile; auto = host for timing on CPU devices"
    )
    priority: Priority = Field(Priority.normal, strict=False)
    timeout_s: float = Field(3600, gt=0, le=7 * 86400, description="Ends the job as timed_out after this long.")
    start_within_s: float | None = Field(None, gt=0, le=30 * 86400, description="Else the job becomes expired.")
    seed: int = Field(0, ge=0, lt=2**63)
    threads: int | None = Field(None, ge=1, le=1024, description="null = the cores of the leased devices")

    @field_validator("name")
    @classmethod
    def _name_is_one_line(cls, name: str | None) -> str | None:
        if name is not None and _CONTROL.search(name):
            raise ValueError("must be one line without control characters")
        return name

    @field_validator("labels")
    @classmethod
    def _labels_are_short_words(cls, labels: dict[str, str]) -> dict[str, str]:
        for key, value in labels.items():
            if not _LABEL_KEY.fullmatch(key):
                raise ValueError(f"label key {key[:80]!r}: 1 to 63 letters, digits and ._/- are allowed")
            if len(value) > 200:
                raise ValueError(f"label {key!r}: the value is over 200 characters")
            if _CONTROL.search(value):
                raise ValueError(f"label {key!r}: the value must be one line without control characters")
        return labels


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
    budget_s: float = Field(20, gt=0, le=86400, description="Seconds that measuring may take in all.")
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
            raise ValueError(f"baseline {self.baseline.value!r} is not among the variants")
        for what, values in (("variants", self.variants), ("batch_sizes", self.batch_sizes)):
            if len(set(values)) != len(values):
                raise ValueError(f"{what}: each may be named once")
        return self


# The closed set of kinds. With a second kind this becomes Annotated[JitSpec | AsyncSpec, Field(discriminator="kind")].
KINDS: dict[str, type[BaseSpec]] = {"jit": JitSpec}
Spec = JitSpec

EXAMPLES: dict[str, dict[str, Any]] = {
    "jit": {
        "kind": "jit",
        "name": "the chapter's MLP",
        "model": {"preset": "mlp"},
        "variants": ["eager", "script", "trace"],
        "batch_sizes": [1],
        "calls": 1000,
    },
}

_adapter: TypeAdapter[Spec] = TypeAdapter(Spec)


def parse_spec(body: Any) -> Spec:
    """The spec that `body` (decoded JSON) describes, with its defaults filled in.

    Raises InvalidRequest with one pointer and sentence per fault.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", errors=[{"pointer": "", "detail": "not an object"}])
    kind = body.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        detail = "the field is required" if "kind" not in body else f"unknown kind {str(kind)[:80]!r}"
        raise InvalidRequest(
            f"{detail}; the kinds are: {known}",
            errors=[{"pointer": "/kind", "detail": f"{detail}; the kinds are: {known}"}],
        )
    try:
        return _adapter.validate_python(body)
    except ValidationError as error:
        errors = [_field_error(e["loc"], e["msg"], e["type"]) for e in error.errors(include_url=False)]
        first = errors[0]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise InvalidRequest(f"{first['pointer'] or 'the body'}: {first['detail']}{more}", errors=errors) from None


def _field_error(location: tuple[int | str, ...], message: str, code: str) -> FieldError:
    pointer = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location)
    if code == "extra_forbidden":
        message = "unknown field"
    elif code == "missing":
        message = "the field is required"
    return {"pointer": pointer, "detail": message.removeprefix("Value error, ")}
