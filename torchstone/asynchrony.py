"""What an `async` job can be told: which of the asynchrony experiments to run, on matrices of which size.

    spec = parse_spec({"kind": "async", "size": 256, "parts": ["dispatch"]})
    spec.memory_bytes               # the least that the job takes

The defaults are the chapter's: 1000 x 1000, 10 times, every part.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from torchstone.base_spec import OUTSIDE_BUDGET, BaseSpec
from torchstone.facts import BYTES
from torchstone.strict import each_once


class Part(StrEnum):
    """One experiment of an `async` job."""

    numpy_vs_torch = "numpy_vs_torch"
    dispatch = "dispatch"
    barriers = "barriers"
    graph = "graph"


_MATRICES = {Part.numpy_vs_torch: 12, Part.dispatch: 3}
"""Whole matrices of `size` that are held at once, at least; the other parts' are small."""


class AsyncSpec(BaseSpec):
    """Who waits for whom: dispatch against completion, what barriers cost, what overlaps, numpy against torch."""

    kind: Literal["async"]
    size: int = Field(1000, ge=1, le=65536, description="Rows and columns of the matrices.")
    repeats: int = Field(10, ge=1, le=100_000, description="Products in a loop, where a part times a loop.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Of numpy's and of torch's numbers alike.")
    parts: list[Annotated[Part, Field(strict=False)]] = Field(
        default_factory=lambda: list(Part), min_length=1, max_length=len(Part)
    )
    calls: int | None = Field(
        None, ge=1, le=10_000_000, description="A fixed number of timed calls of each contestant; null = by precision."
    )
    ci_half_width: float = Field(0.01, gt=0, lt=1, description="Stop when every comparison's CI is this narrow.")
    budget_s: float = Field(30, gt=0, le=86400, description=f"Seconds that measuring may take in all. {OUTSIDE_BUDGET}")

    @property
    def memory_bytes(self) -> int:
        """The least memory that the job takes: the matrices of its largest part."""
        matrices = max(_MATRICES.get(part, 0) for part in self.parts)
        return matrices * self.size * self.size * BYTES[self.dtype]

    @model_validator(mode="after")
    def _each_part_is_named_once(self) -> Self:
        each_once(self, "parts")
        return self
