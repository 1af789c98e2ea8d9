"""Measuring points: at which a race is run, and how its rows say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """Where a race is run: a batch size, with caches warm or emptied before each call."""

    batch_size: int
    cold: bool
    tell_cache: bool

    @property
    def key(self) -> str:
        return f"{self.batch_size}/cold" if self.cold else str(self.batch_size)

    @property
    def at(self) -> dict[str, Any]:
        cache = {"cache": "cold" if self.cold else "hot"} if self.tell_cache else {}
        return {"batch_size": self.batch_size, **cache}

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.at.items())
