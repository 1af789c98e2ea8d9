"""Reads and writes of the store from async code.

    row = await database.read(jobs.get, job_id)
    state = await database.write(jobs.cancel, job_id)

A read on SQLite takes well under a millisecond and never waits for a lock, so it is made in place: a hop to a thread
would cost more than the read. PostgreSQL is across a socket and is asked from a thread. Writes wait for locks and for
the disk; they always are in a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from sqlalchemy import Connection

from torchstone.store import Store

Given = ParamSpec("Given")
Answer = TypeVar("Answer")
_THREADS = 16  # fewer than the pool has connections, so that nobody waits in a thread for one


class Database:
    """The store, for coroutines."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._reading = CapacityLimiter(_THREADS)
        self._writing = CapacityLimiter(2)

    async def read(
        self, query: Callable[Concatenate[Connection, Given], Answer], *args: Given.args, **options: Given.kwargs
    ) -> Answer:
        """What `query(conn, ...)` answers."""
        if self.store.is_sqlite:
            with self.store.read() as conn:
                return query(conn, *args, **options)

        def in_thread() -> Answer:
            with self.store.read() as conn:
                return query(conn, *args, **options)

        return await to_thread.run_sync(in_thread, limiter=self._reading)

    async def write(
        self, change: Callable[Concatenate[Connection, Given], Answer], *args: Given.args, **options: Given.kwargs
    ) -> Answer:
        """What `change(conn, ...)` answers, once it is committed."""

        def in_thread() -> Answer:
            with self.store.write() as conn:
                return change(conn, *args, **options)

        return await to_thread.run_sync(in_thread, limiter=self._writing)
