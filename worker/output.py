"""What a job printed, on its way into the database.

output = Output(limit_bytes)
output.feed(b"...")
chunks = output.pending()          # written, and then
output.stored(chunks)
"""

from __future__ import annotations

import codecs

_CHUNK_CHARS = 1 << 18


class Output:
    """What a job printed: decoded, cut at a limit, in numbered chunks that wait until they are stored."""

    def __init__(self, limit_bytes: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._text = ""
        self._chunks: list[tuple[int, str]] = []
        self._seq = 0

    @property
    def has_pending(self) -> bool:
        """Whether there is something to store."""
        return bool(self._text or self._chunks)

    def feed(self, data: bytes) -> None:
        """Take what was printed; past the limit it is only counted."""
        left_bytes = max(0, self._limit_bytes - self._taken_bytes)
        self._taken_bytes += len(data)
        self._text += self._decoder.decode(data[:left_bytes])
        while len(self._text) >= _CHUNK_CHARS:
            self._seal(_CHUNK_CHARS)

    def close(self) -> None:
        """Nothing more is printed: say what was dropped."""
        self._text += self._decoder.decode(b"", final=True)
        dropped = self._taken_bytes - self._limit_bytes
        if dropped > 0:
            self._text += f"\n[output over {self._limit_bytes} bytes is not kept: {dropped} bytes were dropped]\n"

    def pending(self) -> list[tuple[int, str]]:
        """The chunks that were not stored yet, as (seq, text)."""
        if self._text:
            self._seal(len(self._text))
        return list(self._chunks)

    def stored(self, chunks: list[tuple[int, str]]) -> None:
        """These chunks, as `pending` gave them, are in the database."""
        del self._chunks[: len(chunks)]

    def _seal(self, chars: int) -> None:
        self._chunks.append((self._seq, self._text[:chars]))
        self._text = self._text[chars:]
        self._seq += 1
