"""Accepts jobs: the one writer of this process, which commits whatever arrived meanwhile in one transaction.

    stored = await writer.accept(NewJob.of(spec))      # returns once it is durable

An fsync costs about a millisecond however much it covers, so fifty clients that POST at once share one. While a commit
runs, in a thread of its own, the next batch gathers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from torchstone.errors import Unavailable
from torchstone.store import Store, is_transient, jobs
from torchstone.store.jobs import NewJob, Stored

ACCEPT_WITHIN_S = 15.0
"""A database that is locked or away for longer is answered with 503."""
_MOST_IN_A_COMMIT = 500
_Entry = tuple[NewJob, "asyncio.Future[Stored]"]


class Writer:
    """Group commit of new jobs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[_Entry] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")

    async def accept(self, new: NewJob) -> Stored:
        """Store a job durably. Raises Unavailable where that takes too long: it may still be stored later."""
        future: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        self._waiting.append((new, future))
        self._arrived.set()
        try:
            async with asyncio.timeout(ACCEPT_WITHIN_S):
                return await future
        except TimeoutError:
            raise Unavailable(
                "the database did not take the job in time, and it may or may not have got it: "
                "with an Idempotency-Key the same request can be repeated safely"
            ) from None

    async def run(self) -> None:
        """Commit batch after batch, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                batch, self._waiting = self._waiting[:_MOST_IN_A_COMMIT], self._waiting[_MOST_IN_A_COMMIT:]
                batch = [(new, future) for new, future in batch if not future.done()]  # some gave up meanwhile
                outcome = await loop.run_in_executor(self._thread, self._commit, [new for new, _ in batch])
                for (_, future), stored in zip(batch, outcome, strict=True):
                    if future.done():
                        continue
                    if isinstance(stored, Stored):
                        future.set_result(stored)
                    else:
                        future.set_exception(stored)

    def close(self) -> None:
        """Let a commit that runs come to its end."""
        self._thread.shutdown()

    def _commit(self, batch: Sequence[NewJob]) -> Sequence[Stored | Exception]:
        try:
            return self._insert(batch)
        except SQLAlchemyError as error:
            if len(batch) == 1 or is_transient(error):
                return [error] * len(batch)
        # One of them is at fault: the others must not suffer for it.
        return [outcome for new in batch for outcome in self._commit([new])]

    def _insert(self, batch: Sequence[NewJob]) -> list[Stored]:
        for _ in range(3):
            try:
                with self._store.write() as conn:
                    return jobs.insert_many(conn, batch)
            except IntegrityError:
                continue  # another process took an idempotency key in this very moment: now it can be seen
        with self._store.write() as conn:
            return jobs.insert_many(conn, batch)
