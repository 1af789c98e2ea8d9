"""Accepts jobs: the one writer of this process, which commits whatever arrived meanwhile in one transaction.

    accepted = await writer.accept(NewJob.of(spec))      # returns once it is durable
    accepted.ahead                                        # how many queued jobs come before it

An fsync costs about a millisecond however much it covers, so fifty clients that POST at once share one. While a commit
runs, in a thread of its own, the next batch gathers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from torchstone.errors import Unavailable
from torchstone.scheduling import rank_us
from torchstone.store import Store, is_transient, jobs
from torchstone.store.jobs import NewJob, Stored

ACCEPT_WITHIN_S = 15.0
"""A database that is locked or away for longer is answered with 503."""
_MOST_IN_A_COMMIT = 500
_Entry = tuple[NewJob, "asyncio.Future[Accepted]"]


@dataclass(frozen=True)
class Accepted:
    """What became of a new job, and how many queued ones came before it at that moment."""

    stored: Stored
    ahead: int


class Writer:
    """Group commit of new jobs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[_Entry] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._committing_since_s: float | None = None

    @property
    def held_up_s(self) -> float:
        """For how long the database has not taken the jobs that are waiting to be stored."""
        since_s = self._committing_since_s
        return 0.0 if since_s is None else monotonic() - since_s

    async def accept(self, new: NewJob) -> Accepted:
        """Store a job durably. Raises Unavailable where that takes too long: it may still be stored later."""
        future: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
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
                self._committing_since_s = monotonic()
                outcome = await loop.run_in_executor(self._thread, self._commit, [new for new, _ in batch])
                self._committing_since_s = None
                for (_, future), answer in zip(batch, outcome, strict=True):
                    if future.done():
                        continue
                    if isinstance(answer, Accepted):
                        future.set_result(answer)
                    else:
                        future.set_exception(answer)

    def close(self) -> None:
        """Let a commit that runs come to its end."""
        self._thread.shutdown()

    def _commit(self, batch: Sequence[NewJob]) -> Sequence[Accepted | Exception]:
        try:
            with self._store.write() as conn:
                stored = jobs.insert_many(conn, batch)
                ahead = _ahead(conn, batch, stored)
            return [Accepted(each, ahead[new.job_id]) for new, each in zip(batch, stored, strict=True)]
        except Exception as error:  # whatever it is, it is for those who asked: the writer goes on
            if len(batch) <= 1 or (isinstance(error, SQLAlchemyError) and is_transient(error)):
                return [error] * len(batch)
        # One of them is at fault: the others must not suffer for it.
        return [outcome for new in batch for outcome in self._commit([new])]


def _ahead(conn: Connection, batch: Sequence[NewJob], stored: Sequence[Stored]) -> dict[str, int]:
    """How many jobs are ahead of each: counted once for each priority, not once for each job."""
    ahead = {new.job_id: 0 for new in batch}
    by_rank: dict[int, list[str]] = {}
    for new, each in zip(batch, stored, strict=True):
        if each.created:
            by_rank.setdefault(rank_us(each.created_us, new.row["priority"]), []).append(new.job_id)
    for rank, job_ids in by_rank.items():
        job_ids.sort()
        before = jobs.ahead_of(conn, job_ids[0], rank)
        ahead |= {job_id: min(before + rank, jobs.MOST_AHEAD) for rank, job_id in enumerate(job_ids)}
    return ahead
