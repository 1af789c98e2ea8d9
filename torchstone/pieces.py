"""What `torchstone.render` builds its text of: titled tables, cut where they get too long, with notes below them.

notes = Notes()
row = ["script", notes.mark("inconclusive", "two threads on one core: only other load makes them faster")]
section("latency", ["of", "verdict"], [row], notes=notes)      # "inconclusive [1]", and "[1] two threads ..."
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from torchstone.columns import aligned
from torchstone.quantities import number

WIDEST = 120
_INDENT = "  "
WITHIN = WIDEST - len(_INDENT)
"""What is left of that below a title."""
_MOST_ROWS = 40
_LONGEST_IN_A_ROW = 40


class Notes:
    """What is too long for a row: told once below its table, however many rows it is about."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def cell(self, text: str) -> str:
        """`text`, or where it is long the mark of its note."""
        if len(text) <= _LONGEST_IN_A_ROW:
            return text
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"

    def mark(self, word: str, reason: str) -> str:
        """A word and why: "withheld (its output differs)"."""
        told = self.cell(reason)
        return f"{word} {told}" if told != reason else f"{word} ({reason})"

    def lines(self) -> list[str]:
        """Below the table."""
        found = []
        for index, text in enumerate(self.texts, 1):
            found += folded(text, f"  [{index}] ")
        return found


def section(
    title: str,
    header: Sequence[str],
    rows: list[list[str]],
    most: int = _MOST_ROWS,
    rest: str = "see result.csv",
    notes: Notes | None = None,
) -> list[str]:
    """A titled table, cut where it would be too long to read (`rest` says where it goes on); nothing without rows."""
    if not rows:
        return []
    more = [f"  ... and {len(rows) - most} more: {rest}"] if len(rows) > most else []
    return [title, *indent(aligned(header, rows[:most], WITHIN)), *more, *(notes.lines() if notes else [])]


def indent(lines: Sequence[str]) -> list[str]:
    """Below a title."""
    return [f"{_INDENT}{line}".rstrip() for line in lines]


def folded(text: str, mark: str) -> list[str]:
    """`text` after its mark, in a column of its own."""
    return textwrap.wrap(
        text, WIDEST, initial_indent=mark, subsequent_indent=" " * len(mark), break_on_hyphens=False
    ) or [mark.rstrip()]


def cell(value: Any) -> str:
    """Any JSON value in few words."""
    if value is None or isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, Mapping):
        return " ".join(f"{key}={cell(item)}" for key, item in value.items())
    return " ".join(map(cell, value)) if isinstance(value, (list, tuple)) else str(value)
