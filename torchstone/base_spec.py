"""What every kind of experiment can be told: devices, priority, limits, seed, labels. `torchstone.specs` passes it on.

class JitSpec(BaseSpec):
    kind: Literal["jit"]
    ...
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal

from pydantic import Field, field_validator

from torchstone.strict import Strict

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # PostgreSQL takes no NUL, and a table no line break
_LABEL_KEY = re.compile(r"^[a-zA-Z0-9]([a-zA-Z0-9._/-]{0,61}[a-zA-Z0-9])?$")

OUTSIDE_BUDGET = (
    "Warm-ups are in it; starts of processes, builds and checks come on top, and every contestant gets one round "
    "whatever the budget, so the job takes longer."
)
"""What every `budget_s` for measuring has in common."""


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

    kind: str
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
