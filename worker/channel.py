"""The worker's end of the pipe on which a job sends its messages: read without ever waiting for the rest of one.

    channel = Channel(connection)
    wait([channel.connection], timeout=0.25)
    for message in channel.read(): ...          # the whole ones; None is the end of them

`Connection.recv_bytes` waits until a message is whole. A job that is stopped or killed half-way through a long one,
while a child of it holds the pipe open, would have the worker wait for good, deaf to cancellation and deadline.
"""

from __future__ import annotations

import os
import struct
from multiprocessing.connection import Connection
from typing import Any

import orjson

_READ_BYTES = 1 << 16
_MOST_BYTES = 1 << 30
"""A longer message is none of ours."""


class Channel:
    """Messages as `Connection.send_bytes` frames them: their length in four bytes (-1: in eight more), then JSON."""

    def __init__(self, connection: Connection) -> None:
        """`connection`: to wait for; what is read off it past this channel is lost."""
        self.connection = connection
        self._buffer = bytearray()

    def read(self) -> list[dict[str, Any] | None]:
        """What one read completes; call it when there is something to read. None, as the last, is the end: the pipe was
        closed, or what it holds is no message of ours."""
        try:
            data = os.read(self.connection.fileno(), _READ_BYTES)
        except OSError:
            data = b""
        self._buffer += data
        messages: list[dict[str, Any] | None] = []
        try:
            while (message := self._next()) is not None:
                messages.append(message)
        except ValueError:  # orjson's error is one
            data = b""
        return messages if data else [*messages, None]

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def _next(self) -> dict[str, Any] | None:
        """Take the first message off the buffer, if all of it is there. Raises ValueError where it is none."""
        begin, size = 4, 0
        if len(self._buffer) >= begin:
            (size,) = struct.unpack_from("!i", self._buffer)
            if size == -1:
                begin = 12
                size = struct.unpack_from("!Q", self._buffer, 4)[0] if len(self._buffer) >= begin else 0
        if not 0 <= size <= _MOST_BYTES:
            raise ValueError(f"a message of {size} bytes")
        if len(self._buffer) < begin + max(1, size):
            return None
        message = orjson.loads(self._buffer[begin : begin + size])
        del self._buffer[: begin + size]
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message
