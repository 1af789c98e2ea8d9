"""Query parameters and the Prefer header, read by hand: unknown ones are refused, and nothing is coerced in silence.

    query = Query(request, "state", "kind", "limit")      # InvalidRequest for ?limti=3
    query.integer("limit", 50, least=1, most=500)

A fault's pointer is `?name`, since RFC 6901 points only into bodies.
"""

from __future__ import annotations

import math

from fastapi import Request

from torchstone.errors import InvalidRequest


def refuse(name: str, detail: str) -> InvalidRequest:
    """The error for a query parameter that is not acceptable."""
    return InvalidRequest(f"?{name}: {detail}", errors=[{"pointer": f"?{name}", "detail": detail}])


class Query:
    """The query parameters of one request, of which only the `known` may be there."""

    def __init__(self, request: Request, *known: str) -> None:
        # Most requests have none, and parsing takes longer than looking.
        self._items = request.query_params.multi_items() if request.scope["query_string"] else []
        for name, value in self._items:
            if name not in known:
                there = f"the parameters here are: {', '.join(known)}" if known else "there are no parameters here"
                raise refuse(name[:80], f"unknown parameter; {there}")
            if "\x00" in value:
                raise refuse(name, "must not hold a NUL character")

    def all(self, name: str) -> list[str]:
        """Every value of a parameter that may be repeated."""
        return [value for key, value in self._items if key == name]

    def text(self, name: str) -> str | None:
        """The value of a parameter that may stand once; None where it is absent."""
        values = self.all(name)
        if len(values) > 1:
            raise refuse(name, "may stand only once")
        return values[0] if values else None

    def integer(self, name: str, default: int, *, least: int, most: int) -> int:
        """A whole number within its bounds."""
        value = self.text(name)
        if value is None:
            return default
        if not (value.isascii() and value.isdigit() and len(value) < 20 and least <= int(value) <= most):
            raise refuse(name, f"must be a whole number from {least} to {most}")
        return int(value)

    def flag(self, name: str) -> bool:
        """true or false; false where it is absent."""
        value = self.text(name)
        if value not in (None, "true", "false", "1", "0"):
            raise refuse(name, "must be true or false")
        return value in ("true", "1")

    def seconds(self, name: str, most: float) -> float | None:
        """A time of 0 or more, cut to `most`; None where it is absent."""
        value = self.text(name)
        if value is None:
            return None
        seconds = _seconds(value)
        if seconds is None:
            raise refuse(name, "must be a number of seconds, 0 or more")
        return min(seconds, most)


def preferred_wait_s(request: Request, most: float) -> float | None:
    """The seconds of `Prefer: wait=N` (RFC 7240), cut to `most`. What cannot be understood is ignored, as it says."""
    for header in request.headers.getlist("prefer"):
        for preference in header.split(","):
            name, _, value = preference.partition(";")[0].partition("=")
            if name.strip().lower() == "wait":
                seconds = _seconds(value.strip().strip('"'))
                return None if seconds is None else min(seconds, most)
    return None


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
