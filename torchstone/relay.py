"""Pass on what several programs print, line by line, each behind its name.

    relay = Relay(["broker", "api"])
    relay.feed("api", b"listening on 80")      # nothing yet: the line is not whole
    relay.feed("api", b"00\\n")                 # api    | listening on 8000

Names are coloured on a terminal. A reader that went away (`torchstone up | head`) is no reason to stop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import BinaryIO

_COLOURS = (36, 35, 33, 32, 34)
_LONGEST_LINE_BYTES = 64 << 10


class Relay:
    """Joins the output of named programs into one stream of whole lines."""

    def __init__(self, names: Sequence[str], out: BinaryIO | None = None, colour: bool | None = None) -> None:
        self._out = out or sys.stdout.buffer
        if colour is None:
            colour = self._out.isatty() and "NO_COLOR" not in os.environ
        width = max((len(name) for name in names), default=0)
        self._prefixes = {
            name: (f"\033[{_COLOURS[i % len(_COLOURS)]}m{name:<{width}} |\033[0m " if colour else f"{name:<{width}} | ")
            for i, name in enumerate(names)
        }
        self._rests = dict.fromkeys(names, b"")

    def feed(self, name: str, piece: bytes, hush: tuple[str, ...] = ()) -> None:
        """Take a piece of output; whole lines are written, but for empty ones and those with a word of `hush`."""
        *lines, rest = (self._rests[name] + piece).split(b"\n")
        if len(rest) > _LONGEST_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._rests[name] = rest
        shown = [line for line in lines if line.strip() and not any(word.encode() in line for word in hush)]
        self._write(name, shown)

    def flush(self, name: str) -> None:
        """Write an unfinished last line, too."""
        rest, self._rests[name] = self._rests[name], b""
        if rest:
            self._write(name, [rest])

    def _write(self, name: str, lines: list[bytes]) -> None:
        prefix = self._prefixes[name].encode()
        try:
            self._out.write(b"".join(prefix + line + b"\n" for line in lines))
            self._out.flush()
        except (OSError, ValueError):  # it is closed, or a file on a full disk: what is said is lost, nothing else
            return
