"""The `parallel` experiment's spec: who computes at the same time as whom, and what hides behind what.

    spec = parse_spec({"kind": "parallel"})         # the book's: 50 products of 4000 x 4000 on each of two devices
    spec.devices.count                               # 2; one where `parts` asks for nothing that needs two
    spec.result_bytes, spec.memory_bytes             # 64 MB a product; what all of them hold

On CPU devices a run of the book's size takes minutes: where `budget_s` does not hold it, fewer products are timed, and
the result says so with a code.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from torchstone.base_spec import OUTSIDE_BUDGET, BaseSpec
from torchstone.strict import each_once, refusal

_ITEM_BYTES = {"float32": 4, "float64": 8}


class Part(StrEnum):
    """An experiment within the experiment."""

    concurrency = "concurrency"
    overlap = "overlap"
    streams = "streams"
    schedule = "schedule"


NEEDS_TWO = (Part.concurrency, Part.schedule)
"""What a single device has no answer to."""


class ParallelSpec(BaseSpec):
    """Automatic parallelism: several devices at once, copies behind computing, streams, and a schedule by hand."""

    kind: Literal["parallel"]
    size: int = Field(4000, ge=8, le=65536, description="A product is of two matrices of size x size.")
    repeats: int = Field(50, ge=1, le=10_000, description="Products in one run on one device; all results are held.")
    dtype: Literal["float32", "float64"] = "float32"
    parts: list[Annotated[Part, Field(strict=False)]] = Field(
        default_factory=lambda: list(Part),
        min_length=1,
        max_length=len(Part),
        description="concurrency and schedule need two devices.",
    )
    streams: int = Field(4, ge=2, le=64, description="Part streams: how many (on a CPU device: threads) at most.")
    ci_half_width: float = Field(0.02, gt=0, lt=1, description="A part ends when its comparisons' CI are this narrow.")
    budget_s: float = Field(
        400, gt=0, le=86400, description=f"Seconds that measuring may take in all parts. {OUTSIDE_BUDGET}"
    )

    @model_validator(mode="before")
    @classmethod
    def _as_many_devices_as_the_parts_need(cls, body: Any) -> Any:
        """Where `devices` gives no count: two, or one where that is enough."""
        devices = body.get("devices", {}) if isinstance(body, dict) else None
        if not isinstance(devices, dict) or "count" in devices:
            return body
        parts = body.get("parts", list(Part))
        needed = 2 if isinstance(parts, list) and any(part in NEEDS_TWO for part in parts) else 1
        return {**body, "devices": {**devices, "count": needed}}

    @model_validator(mode="after")
    def _devices_are_enough(self) -> Self:
        each_once(self, "parts")
        need = [part.value for part in self.parts if part in NEEDS_TWO]
        if need and self.devices.count < 2:
            rest = [part.value for part in self.parts if part not in NEEDS_TWO] or ["overlap", "streams"]
            quoted = ", ".join(f'"{part}"' for part in rest)
            raise refusal(
                [
                    (
                        ("devices", "count"),
                        f"two devices are needed by {' and '.join(need)}, and {self.devices.count} is asked for: "
                        f'ask for "devices": {{"count": 2}}, or for "parts": [{quoted}], which run on one',
                    )
                ]
            )
        return self

    @property
    def result_bytes(self) -> int:
        """What one product takes."""
        return self.size * self.size * _ITEM_BYTES[self.dtype]

    @property
    def memory_bytes(self) -> int:
        """What the hungriest part holds at once: every product of a run, of each device or with its copy, and what
        they are checked against."""
        held = self.repeats + 3
        on = [self.devices.count * held * (part is Part.concurrency) for part in self.parts]
        on += [(held + self.repeats) * (part is Part.overlap) for part in self.parts]
        return self.result_bytes * max(*on, held)
