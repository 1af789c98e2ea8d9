"""The base of everything in a spec: unknown fields, non-finite numbers and silent coercions are refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A frozen part of a spec that takes exactly its own fields, in their own JSON types."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
