"""Removes what need not be kept: jobs by age and size, and bytes that no job names (`torchstone.store.retention`)."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import structlog
from sqlalchemy.exc import SQLAlchemyError

from torchstone.settings import Settings
from torchstone.store import Store, is_transient, retention
from torchstone.store.artifacts import Blobs

_SWEEP_EVERY_S = 3600.0
log = structlog.get_logger(__name__)


class Collector:
    """Collects every `settings.collect_s`, and whenever it is woken."""

    def __init__(self, store: Store, blobs: Blobs, settings: Settings) -> None:
        self._store, self._blobs, self._settings = store, blobs, settings
        self._wanted = asyncio.Event()
        self._swept_s: float | None = None

    def wake(self) -> None:
        """Something was let go just now."""
        self._wanted.set()

    async def run(self) -> None:
        """Collect again and again, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.collect_s):
                    await self._wanted.wait()
            self._wanted.clear()
            try:
                collected = await asyncio.to_thread(retention.collect, self._store, self._blobs, self._settings)
                swept = await asyncio.to_thread(self._sweep)
            except Exception as error:  # the artifact store's own, too: the next round tries again
                if not (isinstance(error, SQLAlchemyError) and is_transient(error)):
                    log.exception("collecting failed; trying again")
                continue
            for job_id in collected.job_ids:
                log.info("deleted a job that need not be kept", job_id=job_id)
            if collected.blobs:
                log.info("removed bytes that no job names", blobs=collected.blobs)
            if swept:
                log.info("removed what was left of files that were never whole", files=swept)

    def _sweep(self) -> int:
        """Once an hour: it looks at every blob of a folder."""
        now_s = time.monotonic()
        if self._swept_s is not None and now_s - self._swept_s < _SWEEP_EVERY_S:
            return 0
        self._swept_s = now_s
        return self._blobs.sweep()
