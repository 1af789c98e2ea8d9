"""The base of everything in a spec: unknown fields, non-finite numbers and silent coercions are refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

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


def each_once(spec: BaseModel, *fields: str) -> None:
    """Raises what refuses the first of these fields, lists all, in which something is named twice."""
    for field in fields:
        values = getattr(spec, field)
        if len(set(values)) != len(values):
            raise refusal([((field,), "each may be named once")])


def near(name: str, names: Iterable[str]) -> str:
    """ " (did you mean Linear?)" where something is near `name`, whatever its case."""
    by_lower = {known.lower(): known for known in names}
    lower = name[:80].lower()
    matches = [lower] if lower in by_lower else difflib.get_close_matches(lower, by_lower, n=3, cutoff=0.75)
    return f" (did you mean {' or '.join(by_lower[match] for match in matches)}?)" if matches else ""
