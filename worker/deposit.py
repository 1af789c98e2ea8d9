"""The files of an attempt on their way into the artifact store, before its result names them.

    deposit = Deposit(blobs, holder, persist, closing)
    deposit.store([{"name": "script.pt", "path": ..., "media_type": ...}])     # the rows for `leases.finish`
    deposit.leave()                                                            # what was stored in vain can go

The bytes are pinned first, so that nobody removes them meanwhile. A bucket that is away is waited for a while: a result
of hours is not lost for its hiccup.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from torchstone.errors import Unavailable
from torchstone.store import retention
from torchstone.store.artifacts import Blobs, digest
from torchstone.store.leases import Holder

BUCKET_BACK_WITHIN_S = 60.0
_TRY_EVERY_S = 2.0
_PIN_WITHIN_S = 2.5 * retention.REMOVED_WITHIN_S  # the service, which looks every minute, ends what nobody else does
Persist = Callable[[Callable[[Connection], Any]], Any]
"""Runs a transaction, again and again while the database is away; None if the worker closes first."""
log = structlog.get_logger(__name__)


class Closing(Exception):
    """The worker closes, and there is no time to wait for what storing takes."""


class Deposit:
    """Those of one attempt."""

    def __init__(self, blobs: Blobs, holder: Holder, persist: Persist, closing: threading.Event) -> None:
        self._blobs, self._holder, self._persist, self._closing = blobs, holder, persist, closing
        self._put: list[str] = []

    def store(self, made: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of the files once stored; none where the job was taken away.

        Raises OSError, naming the file; Closing where that may yet be done by another attempt.
        """
        name = ""
        rows: list[dict[str, Any]] = []
        try:
            digests = {}
            for file in made:
                name = file["name"]
                digests[name] = digest(Path(file["path"]))
            if not self._pin(list(digests.values())):
                return []
            for file in made:
                name = file["name"]
                sha256, size = self._put_patiently(Path(file["path"]), digests[name])
                rows.append({"name": name, "media_type": file["media_type"], "bytes": size, "sha256": sha256})
        except (SQLAlchemyError, Closing):
            raise
        except Exception as error:
            raise OSError(f"{name}: {error}") from error
        return rows

    def leave(self) -> None:
        """Have all that was stored found by whoever removes what nobody names."""
        self._persist(lambda conn: retention.leave(conn, self._holder, self._put))

    def _put_patiently(self, path: Path, sha256: str) -> tuple[str, int]:
        self._put.append(sha256)
        deadline_s = time.monotonic() + BUCKET_BACK_WITHIN_S
        while True:
            try:
                return self._blobs.put(path, sha256)
            except Unavailable as error:
                if self._blobs.is_local or time.monotonic() > deadline_s:
                    raise
                log.warning("a file could not be stored; trying on", job_id=self._holder.job_id, error=error.detail)
                if self._closing.wait(_TRY_EVERY_S):
                    raise Closing from None

    def _pin(self, digests: list[str]) -> bool:
        """Whether this attempt may store these bytes, once nobody is removing them any more."""
        deadline_s = time.monotonic() + _PIN_WITHIN_S
        while (found := self._persist(lambda conn: retention.pin(conn, self._holder, digests))) is retention.Pin.wait:
            if self._closing.wait(0.2):
                raise Closing
            if time.monotonic() > deadline_s:
                raise TimeoutError("the same bytes are being removed, and that does not end")
        if found is None:
            raise Closing
        return found is retention.Pin.held
