"""Wakes everybody who waits for a job to change: one poller for the whole process, however many wait.

    with waits.watch(job_id) as watch:
        while not done(await read(job_id)):          # first look, then wait: no change is missed in between
            await watch.changed(timeout_s)

On SQLite the poller asks `PRAGMA data_version`, which takes microseconds and tells whether anybody wrote at all; only
then, and on PostgreSQL each time, it asks for the newest event of each job that is watched, in one query. It asks every
5 ms after something happened and less and less often while nothing does, since the jobs that run meanwhile measure
time on this very machine.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import structlog
from fastapi import Request

from service.database import Database
from torchstone.jobs import TERMINAL
from torchstone.store import events, jobs
from torchstone.store.probe import Probe

_QUICKEST_S = 0.005
_SLOWEST_S = 0.02
_AFTER_AN_ERROR_S = 1.0
_JOBS_IN_A_QUERY = 500

log = structlog.get_logger(__name__)


class Watch:
    """One client's view of one job."""

    def __init__(self) -> None:
        self.seen: int | None = -1  # no event has that number, nor is it None, which says that the job is gone
        self._changed = asyncio.Event()
        self.released = False

    def wake(self) -> None:
        """Let `changed` return."""
        self._changed.set()

    async def changed(self, timeout_s: float | None) -> bool:
        """Whether the job changed within this time since the last call; the first call may return with no change."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return not self.released


class Waits:
    """Everybody who waits, and the poller that wakes them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._probe = Probe(database.store)
        self._watches: defaultdict[str, set[Watch]] = defaultdict(set)
        self._wanted = asyncio.Event()
        self._newcomers = False
        self._released = False
        self._happened_s = 0.0

    @contextmanager
    def watch(self, job_id: str) -> Iterator[Watch]:
        """Watch a job until the end of the block."""
        watch = Watch()
        watch.released = self._released
        self._watches[job_id].add(watch)
        self._newcomers = True
        self._wanted.set()
        try:
            yield watch
        finally:
            self._watches[job_id].discard(watch)
            if not self._watches[job_id]:
                del self._watches[job_id]

    def release(self) -> None:
        """Send everybody home: the process stops."""
        self._released = True
        for watches in self._watches.values():
            for watch in watches:
                watch.released = True
                watch.wake()

    def close(self) -> None:
        """Give the poller's connection back."""
        self._probe.close()

    async def run(self) -> None:
        """Poll while somebody waits, until cancelled."""
        while True:
            if not self._watches:
                self._wanted.clear()
                await self._wanted.wait()
            try:
                await self._look()
            except Exception as error:  # the driver's own, too: whoever waits, now or later, depends on this going on
                log.warning("cannot look for changes; trying again", error=str(getattr(error, "orig", error)))
                await asyncio.sleep(_AFTER_AN_ERROR_S)
            quiet_s = monotonic() - self._happened_s
            await asyncio.sleep(min(_SLOWEST_S, max(_QUICKEST_S, quiet_s / 100)))

    async def _look(self) -> None:
        if not self._probe.changed() and not self._newcomers:
            return
        self._newcomers = False  # from here on: whoever comes while it looks is one
        try:
            await self._tell()
        except BaseException:
            self._newcomers = True  # the probe will not say it again
            raise

    async def _tell(self) -> None:
        job_ids = list(self._watches)
        for begin in range(0, len(job_ids), _JOBS_IN_A_QUERY):
            asked = job_ids[begin : begin + _JOBS_IN_A_QUERY]
            newest = await self._database.read(events.latest, asked)
            for job_id in asked:
                event_id = newest.get(job_id)  # none where the job was deleted
                for watch in self._watches.get(job_id, ()):
                    if watch.seen != event_id:
                        watch.seen = event_id
                        watch.wake()
                        self._happened_s = monotonic()


async def until_finished(waits: Waits, database: Database, request: Request, job_id: str, timeout_s: float) -> None:
    """Return once the job is finished or deleted, this time is over, the client is gone, or the process stops."""
    deadline_s = monotonic() + timeout_s
    gone = asyncio.create_task(disconnected(request))
    try:
        with waits.watch(job_id) as watch:
            while (state := await database.read(jobs.state_of, job_id)) is not None and state not in TERMINAL:
                left_s = deadline_s - monotonic()
                if left_s <= 0:
                    return
                change = asyncio.create_task(watch.changed(left_s))
                await asyncio.wait({change, gone}, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    change.cancel()
                    return
                if not change.result():
                    return
    finally:
        gone.cancel()


async def disconnected(request: Request) -> None:
    """Return once the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
