"""Removes what need not be kept: jobs by age and size, and bytes that no job names (`torchstone.store.retention`).

    collector = Collector(store, blobs, settings)
    collector.start()
    collector.wake()        # something was let go just now
    collector.close()

In a thread that is not waited for when the process ends: a bucket may take its time to answer, and a removal that
breaks off is made again.
"""

from __future__ import annotations

import threading
import time

import structlog
from sqlalchemy.exc import SQLAlchemyError

from torchstone.settings import Settings
from torchstone.store import Store, is_transient, retention
from torchstone.store.artifacts import Blobs

_SWEEP_EVERY_S = 3600.0
_ENDED_WITHIN_S = 1.0
log = structlog.get_logger(__name__)


class Collector:
    """Collects every `settings.collect_s`, and whenever it is woken."""

    def __init__(self, store: Store, blobs: Blobs, settings: Settings) -> None:
        self._store, self._blobs, self._settings = store, blobs, settings
        self._wanted = threading.Event()
        self._closing = False
        self._swept_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)

    def start(self) -> None:
        """Collect again and again from now on."""
        self._thread.start()

    def wake(self) -> None:
        """Something was let go just now."""
        self._wanted.set()

    def close(self) -> None:
        """Begin no other round."""
        self._closing = True
        self._wanted.set()
        self._thread.join(_ENDED_WITHIN_S)

    def _run(self) -> None:
        while True:
            self._wanted.wait(self._settings.collect_s)
            self._wanted.clear()
            if self._closing:
                return
            try:
                self._round()
            except Exception as error:  # the artifact store's own, too: the next round tries again
                if not (isinstance(error, SQLAlchemyError) and is_transient(error)):
                    log.exception("collecting failed; trying again")

    def _round(self) -> None:
        collected = retention.collect(self._store, self._blobs, self._settings, lambda: self._closing)
        for job_id in collected.job_ids:
            log.info("deleted a job that need not be kept", job_id=job_id)
        if collected.blobs:
            log.info("removed bytes that no job names", blobs=collected.blobs)
        swept = self._sweep()
        if swept:
            log.info("removed what was left of files that were never whole", files=swept)

    def _sweep(self) -> int:
        """Once an hour: it looks at every blob of a folder."""
        now_s = time.monotonic()
        if self._swept_s is not None and now_s - self._swept_s < _SWEEP_EVERY_S:
            return 0
        self._swept_s = now_s
        return self._blobs.sweep()
