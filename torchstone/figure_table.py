"""Figures as text: side by side where several contestants have the same ones, else one below the other.

figure_table(result["figures"])        # the lines of the section, indented

                    unit       single      ddp
samples_per_s       samples/s    1234     2345
scaling_efficiency                  -   0.9500
  95 % interval                     -   0.93 .. 0.97
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchstone.columns import aligned
from torchstone.quantities import number, quantity, scale

Json = Mapping[str, Any]
_MOST_COLUMNS = 8
_MOST_ROWS = 40


def figure_table(figures: Sequence[Json]) -> list[str]:
    """The section's lines under its title; nothing without figures."""
    if not figures:
        return []
    shared = _shared(figures)
    contestants = list(dict.fromkeys(row["of"] for row in figures if row["name"] in shared))
    beside = [row for row in figures if row["name"] in shared] if len(contestants) <= _MOST_COLUMNS else []
    below = [row for row in figures if row not in beside]
    tables = [table for table in (_matrix(beside, contestants), _list(below)) if table]
    return ["figures", *_indented([line for table in tables for line in ["", *table]][1:])]


def point(row: Json) -> str:
    """Where a row was measured, e.g. "batch_size=1, cache=cold"."""
    return ", ".join(f"{key}={value}" for key, value in (row.get("at") or {}).items())


def _shared(figures: Sequence[Json]) -> set[str]:
    """Names of the figures that several contestants have."""
    owners: dict[str, set[str]] = {}
    for row in figures:
        owners.setdefault(row["name"], set()).add(row["of"])
    return {name for name, of in owners.items() if len(of) > 1}


def _matrix(figures: Sequence[Json], contestants: Sequence[str]) -> list[str]:
    cells: dict[tuple[str, str, str], dict[str, Json]] = {}
    for row in figures:
        cells.setdefault((row["name"], point(row), row["unit"]), {})[row["of"]] = row
    names = list(dict.fromkeys(name for name, _, _ in cells))
    rows, notes = [], []
    for (name, at, unit), by_contestant in sorted(cells.items(), key=lambda cell: names.index(cell[0][0])):
        values = [by_contestant.get(of, {}).get("value") for of in contestants]
        fitting = scale(values, unit)
        shown = [number(value * fitting.factor) if value is not None else "-" for value in values]
        rows.append([name, at, "" if fitting.unit == "1" else fitting.unit, *shown])
        intervals = [by_contestant.get(of, {}).get("ci95") for of in contestants]
        if any(intervals):
            ends = [
                " .. ".join(number(end * fitting.factor, 3) for end in pair) if pair and None not in pair else "-"
                for pair in intervals
            ]
            rows.append(["  95 % interval", "", "", *ends])
        notes += [_note(row) for row in by_contestant.values() if row.get("reason")]
    lines = aligned(["", "at", "unit", *contestants], rows[:_MOST_ROWS]) if rows else []
    more = [f"... and {len(rows) - _MOST_ROWS} more: see result.csv"] if len(rows) > _MOST_ROWS else []
    return lines + more + notes


def _note(row: Json) -> str:
    where = f" at {point(row)}" if row.get("at") else ""
    return f"{row['name']} of {row['of']}{where}: {row['reason']}"


def _list(figures: Sequence[Json]) -> list[str]:
    rows = [
        [row["name"], row["of"], point(row), quantity(row.get("value"), row["unit"]), row.get("reason") or ""]
        for row in figures
    ]
    more = [f"... and {len(rows) - _MOST_ROWS} more: see result.csv"] if len(rows) > _MOST_ROWS else []
    return aligned(["name", "of", "at", "value", "note"], rows[:_MOST_ROWS]) + more if rows else []


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]
