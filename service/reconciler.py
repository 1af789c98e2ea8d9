"""Puts right, every few seconds, what nobody else will: lost workers' jobs, expired jobs, doorbells that got lost.

The first round rings for everything that is queued: a process that crashed between its commit and its bell left jobs
that nobody was told of. Hosts also look by themselves; this only makes them quicker.
"""

from __future__ import annotations

import asyncio

import structlog
from sqlalchemy.exc import SQLAlchemyError

from service.database import Database
from torchstone.queue import Bell
from torchstone.settings import Settings
from torchstone.store import is_transient, leases

log = structlog.get_logger(__name__)


async def reconcile_forever(database: Database, bell: Bell, settings: Settings) -> None:
    """Reconcile every `settings.reconcile_s`, until cancelled."""
    ring_again_s = 0.0
    while True:
        try:
            lost, gangs = await database.write(
                leases.reconcile, max_attempts=settings.max_attempts, ring_again_s=ring_again_s
            )
        except Exception as error:
            if not (isinstance(error, SQLAlchemyError) and is_transient(error)):
                log.exception("reconciling failed; trying again")
            else:
                log.warning("reconciling failed; trying again", error=str(getattr(error, "orig", error)))
        else:
            ring_again_s = settings.ring_again_s
            for job_id in lost:
                log.warning("took a job back from a worker that was not heard of", job_id=job_id)
            for device_type, count in gangs:
                bell.ring(device_type, count)
        await asyncio.sleep(settings.reconcile_s)
