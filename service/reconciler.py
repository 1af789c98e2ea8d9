"""Puts right, every few seconds, what nobody else will: lost workers' jobs, expired jobs, doorbells that got lost.

The first round rings for everything that is queued: a process that crashed between its commit and its bell left jobs
that nobody was told of. Hosts also look by themselves; this only makes them quicker.

A lease says "not heard of for so long", which means something only while its holder could have been heard. So leases
are spared for as long as it takes every living worker to renew them, twice over, after this process started, after
the database could not be reached, and after its clock jumped.
"""

from __future__ import annotations

import asyncio
from time import monotonic

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from service.database import Database
from torchstone.queue import Bell
from torchstone.settings import Settings
from torchstone.store import is_transient, leases
from torchstone.store.leases import Holder

_JUMP_S = 2.0
"""A difference between two clocks that no slow transaction explains."""

log = structlog.get_logger(__name__)


class Reconciler:
    """What one process's rounds know of the rounds before."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen: tuple[float, float] | None = None  # this machine's and the database's clock, in seconds
        self._spare_until_s = monotonic() + 2 * settings.heartbeat_s

    def round(
        self, conn: Connection, asked_s: float, ring_again_s: float
    ) -> tuple[list[Holder], list[tuple[str, int]]]:
        """One round: who lost a job, and which gangs to ring for. `asked_s`: when it asked for this transaction."""
        now_s = monotonic()
        if now_s - asked_s > self._settings.heartbeat_s:
            self.spare(now_s)  # whoever held the lock held up the workers, too
        jumped_s = self._note_clock(now_s, leases.clock_us(conn) / 1e6)
        if abs(jumped_s) > _JUMP_S:
            log.warning("the database's clock jumped; leases are spared until workers had time to renew", by_s=jumped_s)
            self.spare(now_s)
        if jumped_s < -_JUMP_S:
            leases.shorten(conn, self._settings.lease_s)
        return leases.reconcile(
            conn,
            max_attempts=self._settings.max_attempts,
            ring_again_s=ring_again_s,
            spare_leases=now_s < self._spare_until_s,
        )

    def spare(self, now_s: float) -> None:
        """Give every living worker time to renew its leases, from now on."""
        self._spare_until_s = now_s + 2 * self._settings.heartbeat_s

    def _note_clock(self, now_s: float, database_s: float) -> float:
        before, self._seen = self._seen, (now_s, database_s)
        return 0.0 if before is None else round((database_s - before[1]) - (now_s - before[0]), 3)


async def reconcile_forever(database: Database, bell: Bell, settings: Settings) -> None:
    """Reconcile every `settings.reconcile_s`, until cancelled."""
    reconciler = Reconciler(settings)
    ring_again_s = 0.0
    while True:
        try:
            lost, gangs = await database.write(reconciler.round, monotonic(), ring_again_s)
        except Exception as error:
            reconciler.spare(monotonic())
            if not (isinstance(error, SQLAlchemyError) and is_transient(error)):
                log.exception("reconciling failed; trying again")
            else:
                log.warning("reconciling failed; trying again", error=str(getattr(error, "orig", error)))
        else:
            ring_again_s = settings.ring_again_s
            for holder in lost:
                log.warning(
                    "took a job back from a worker that was not heard of",
                    job_id=holder.job_id,
                    attempt=holder.attempt,
                    host=holder.host,
                )
            for device_type, count in gangs:
                bell.ring(device_type, count)
        await asyncio.sleep(settings.reconcile_s)
