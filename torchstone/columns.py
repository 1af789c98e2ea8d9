"""Rows of words as aligned lines of plain text.

    aligned(["of", "n"], [["eager", "240"], ["script", "60"]])
    # of        n
    # ------  ---
    # eager   240
    # script   60

Numbers stand to the right, words to the left; a column that is empty in every row is left out. With `most`, the last
column goes on below itself where its line would be longer than that.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

_GAP = "  "
_NUMBER = r"[-+]?[\d.,]+(e[-+]?\d+)?"
_NUMERIC = re.compile(rf"{_NUMBER}x?|{_NUMBER} [a-zA-Zµ/%]+|{_NUMBER} (\.\.|x) {_NUMBER}|-|")
_NARROWEST = 40


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], most: int | None = None) -> list[str]:
    """The lines; without a header only those of the rows."""
    count = len(header) or max((len(row) for row in rows), default=0)
    columns = [[row[i] if i < len(row) else "" for row in rows] for i in range(count)]
    shown = [i for i, column in enumerate(columns) if any(cell not in ("", "-") for cell in column)]
    lines = [""] * (len(rows) + (2 if header else 0))
    before = 0
    for i in shown:
        cells = [header[i], "", *columns[i]] if header else columns[i]
        width = max(len(cell) for cell in cells)
        if header:
            cells[1] = "-" * width
        to_right = all(_NUMERIC.fullmatch(cell) for cell in columns[i])
        before = max(map(len, lines)) + len(_GAP) if i != shown[0] else 0
        for line, cell in enumerate(cells):
            lines[line] += (_GAP if i != shown[0] else "") + (cell.rjust(width) if to_right else cell.ljust(width))
    if most is not None:
        lines = [piece for line in lines for piece in _folded(line.rstrip(), before, most)]
    return [line.rstrip() for line in lines]


def _folded(line: str, before: int, most: int) -> list[str]:
    """The line with what stands from `before` on in a column of its own."""
    pieces = textwrap.wrap(line[before:], max(_NARROWEST, most - before)) or [""]
    return [line[:before] + pieces[0], *(" " * before + piece for piece in pieces[1:])]
