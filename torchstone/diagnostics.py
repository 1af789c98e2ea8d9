"""The kind `sleep`: jobs that try Torchstone itself, under load and with faults. They measure nothing.

    {"kind": "sleep", "seconds": 0.5}
    {"kind": "sleep", "seconds": 60, "behavior": "deaf", "megabytes": 100}

Accepted only where TORCHSTONE_DIAGNOSTICS is set (`torchstone.specs.kinds`), since most of them misbehave.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from torchstone.base_spec import BaseSpec


class Behavior(StrEnum):
    """What the job does besides waiting."""

    well = "well"
    fork = "fork"  # starts children in sessions of their own, one of them deaf to SIGTERM, and leaves them behind
    deaf = "deaf"  # takes no SIGTERM
    shout = "shout"  # prints `megabytes`
    leak = "leak"  # takes memory until somebody minds
    segfault = "segfault"
    exit = "exit"  # os._exit(3)
    write = "write"  # hands over a file of `megabytes`


class SleepSpec(BaseSpec):
    """Wait for so many seconds; a diagnostic of Torchstone itself."""

    kind: Literal["sleep"]
    seconds: float = Field(0.0, ge=0, le=86400)
    behavior: Annotated[Behavior, Field(strict=False)] = Behavior.well
    megabytes: int = Field(1, ge=0, le=10_000)
    isolation: Literal["auto", "device", "host"] = Field("device", description="It measures nothing.")
