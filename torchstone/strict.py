"""The base of everything in a spec: unknown fields, non-finite numbers and silent coercions are refused."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class Strict(BaseModel):
    """A frozen part of a spec that takes exactly its own fields, in their own JSON types."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True, defer_build=True)


def refusal(faults: Sequence[tuple[tuple[int | str, ...], str]]) -> ValidationError:
    """A validation error that says each sentence of the place below the value being validated.

    Raised inside a validator it keeps its places, so that a fault found by hand points as exactly as pydantic's own.
    """
    details = [  # the sentence goes in as a value: braces in it would be taken for a template's fields
        InitErrorDetails(
            type=PydanticCustomError("refused", "{sentence}", {"sentence": sentence}), loc=place, input=None
        )
        for place, sentence in faults
    ]
    return ValidationError.from_exception_data("refused", details)
