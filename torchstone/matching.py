"""Which rows of a result belong together: those of one contestant at one point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]


def point_keys(rows: Sequence[Json]) -> list[str]:
    """The keys of `at` that tell these rows apart, or that all share: every key, in order of appearance."""
    return list(dict.fromkeys(str(key) for row in rows for key in row.get("at") or {}))


def value_at(row: Json, key: str) -> str:
    """The value at `key` of a row's point, as text."""
    value = (row.get("at") or {}).get(key)
    return "" if value is None else str(value)


def point_in_words(row: Json) -> str:
    """A row's point in words."""
    return ", ".join(f"{key}={value}" for key, value in (row.get("at") or {}).items())


def is_of(comparison: Json, row: Json) -> bool:
    """Whether a comparison is of this row."""
    return bool(comparison["of"] == row["of"] and same_place(comparison, row))


def same_place(comparison: Json, row: Json) -> bool:
    """Whether a comparison is of this row's name and point."""
    return bool(comparison["name"] == row["name"] and (comparison.get("at") or {}) == (row.get("at") or {}))


def is_about(check: Json, row: Json) -> bool:
    """A check at no point, or at part of a row's point, holds for that row."""
    at = row.get("at") or {}
    return bool(
        check["of"] == row["of"] and all(at.get(key) == value for key, value in (check.get("at") or {}).items())
    )


def agrees(check: Json, row: Json) -> bool:
    """Whether nothing that both points tell differs: a check after some steps, for one that was timed over all."""
    at = row.get("at") or {}
    return bool(
        check["of"] == row["of"] and all(at.get(key, value) == value for key, value in (check.get("at") or {}).items())
    )
