"""Rows of words as aligned lines of plain text.

    aligned(["of", "n"], [["eager", "240"], ["script", "60"]])
    # of        n
    # ------  ---
    # eager   240
    # script   60

Numbers stand to the right, words to the left; a column that is empty in every row is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_GAP = "  "
_NUMBER = r"[-+]?[\d.,]+(e[-+]?\d+)?"
_NUMERIC = re.compile(rf"{_NUMBER}x?|{_NUMBER} [a-zA-Zµ/%]+|{_NUMBER} (\.\.|x) {_NUMBER}|-|")


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines; without a header only those of the rows."""
    count = len(header) or max((len(row) for row in rows), default=0)
    columns = [[row[i] if i < len(row) else "" for row in rows] for i in range(count)]
    shown = [i for i, column in enumerate(columns) if any(cell not in ("", "-") for cell in column)]
    lines = [""] * (len(rows) + (2 if header else 0))
    for i in shown:
        cells = [header[i], "", *columns[i]] if header else columns[i]
        width = max(len(cell) for cell in cells)
        if header:
            cells[1] = "-" * width
        to_right = all(_NUMERIC.fullmatch(cell) for cell in columns[i])
        for line, cell in enumerate(cells):
            lines[line] += (_GAP if i != shown[0] else "") + (cell.rjust(width) if to_right else cell.ljust(width))
    return [line.rstrip() for line in lines]
