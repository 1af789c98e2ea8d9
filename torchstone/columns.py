"""Rows of words as aligned lines of plain text.

    aligned(["of", "n"], [["eager", "240"], ["script", "60"]])
    # of        n
    # ------  ---
    # eager   240
    # script   60

Numbers stand to the right, words to the left; a column that is empty in every row is left out. With `most`, columns
of words go on below themselves where lines would be longer than that.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

_GAP = "  "
_NUMBER = r"[-+]?[\d.,]+(e[-+]?\d+)?"
_NUMERIC = re.compile(rf"{_NUMBER}x?|{_NUMBER} [a-zA-Zµ/%]+|{_NUMBER} (\.\.|x) {_NUMBER}|-|")
_NARROWEST = 12
_LONGEST_WORD = 40


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], most: int | None = None) -> list[str]:
    """The lines; without a header only those of the rows."""
    count = len(header) or max((len(row) for row in rows), default=0)
    columns = [[row[i] if i < len(row) else "" for row in rows] for i in range(count)]
    shown = [i for i, column in enumerate(columns) if any(cell not in ("", "-") for cell in column)]
    to_right = {i: all(_NUMERIC.fullmatch(cell) for cell in columns[i]) for i in shown}
    cells = {i: [header[i], *columns[i]] if header else columns[i] for i in shown}
    widths = {i: max(map(len, cells[i])) for i in shown}
    if most is not None:
        widths |= _narrowed(widths, {i: cells[i] for i in shown if not to_right[i]}, most)
    lines = []
    for number in range(len(rows) + bool(header)):
        pieces = {i: _wrapped(cells[i][number], widths[i]) for i in shown}
        for line in range(max(map(len, pieces.values()), default=1)):
            words = {i: piece[line] if line < len(piece) else "" for i, piece in pieces.items()}
            lines.append(_GAP.join(_placed(words[i], widths[i], to_right[i]) for i in shown))
        if header and number == 0:
            lines.append(_GAP.join("-" * widths[i] for i in shown))
    return [line.rstrip() for line in lines]


def _narrowed(widths: Mapping[int, int], texts: Mapping[int, Sequence[str]], most: int) -> dict[int, int]:
    """How wide to make the columns of words so that a line has at most `most`, the widest first.

    None is made narrower than its words; where that does not suffice, all stay as they are: a table that is both too
    wide and folded would be worse than one that is only too wide.
    """
    least = {
        i: max([_NARROWEST, *(min(len(word), _LONGEST_WORD) for cell in cells for word in cell.split())])
        for i, cells in texts.items()
    }
    narrowed = dict(widths)
    excess = sum(widths.values()) + len(_GAP) * (len(widths) - 1) - most
    for _ in range(excess):
        wide = [i for i in texts if narrowed[i] > least[i]]
        if not wide:
            return {}
        narrowed[max(wide, key=lambda i: narrowed[i])] -= 1
    return narrowed


def _wrapped(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False) or [""]


def _placed(word: str, width: int, to_right: bool) -> str:
    return word.rjust(width) if to_right else word.ljust(width)
