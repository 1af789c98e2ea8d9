"""The checkpoints of one attempt: what the one before has saved is fetched, what this one saves is stored.

    keeper = CheckpointKeeper(store, blobs, holder, folder)
    keeper.fetch()                                   # ({"ddp": path, ...}, None), or ({}, why there is nothing to use)
    keeper.take(event, reply=process.reply)          # in a thread of its own: a bucket may be slow
    keeper.settle(closing)                           # before the attempt ends

Storing is a thing that may fail: the job goes on, and an attempt after it goes on from an earlier point.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from torchstone.errors import Gone
from torchstone.store import Store, checkpoints, leases, retention
from torchstone.store.artifacts import Blobs, digest

_SETTLE_WITHIN_S = 60.0


class CheckpointKeeper:
    """Fetches and stores for one attempt."""

    def __init__(self, store: Store, blobs: Blobs, holder: leases.Holder, folder: Path) -> None:
        """`folder`: the attempt's own; what is fetched lies below it."""
        self.store, self.blobs, self.holder, self.folder = store, blobs, holder, folder / "saved"
        self.log = structlog.get_logger(__name__).bind(job_id=holder.job_id, attempt=holder.attempt)
        self._thread: threading.Thread | None = None
        self._is_storing = False

    def fetch(self) -> tuple[dict[str, Path], str | None]:
        """The files that earlier attempts have saved, by name; or none, and the reason, where one of them is unusable.

        Raises SQLAlchemyError.
        """
        with self.store.read() as conn:
            parts = checkpoints.of(conn, self.holder.job_id)
        if not parts:
            return {}, None
        self.folder.mkdir(exist_ok=True)
        files = {part.name: self.folder / str(number) for number, part in enumerate(parts)}
        try:
            for part in parts:
                self.blobs.fetch(part.sha256, files[part.name])
        except Exception as error:  # a bucket has errors of its own
            self.log.warning("the checkpoint cannot be used", error=str(error))
            return {}, f"{type(error).__name__}: {error}" if not isinstance(error, (Gone, ValueError)) else str(error)
        return files, None

    def take(self, event: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> None:
        """Store what the job has saved, and tell it; one at a time."""
        if self._is_storing:
            reply({"stored": False})
            return
        parts = [(str(part["name"]), Path(part["path"])) for part in event["parts"]]
        self._is_storing = True

        def store() -> None:
            stored = self._store(parts)
            self._is_storing = False  # before the answer: the job may save again at once
            reply({"stored": stored})

        self._thread = threading.Thread(target=store, name="checkpoint", daemon=True)
        self._thread.start()

    def settle(self, closing: threading.Event, within_s: float | None = None) -> None:
        """Wait for what is being stored, at most so long, and not while the worker closes."""
        deadline_s = time.monotonic() + (_SETTLE_WITHIN_S if within_s is None else within_s)
        while self._thread is not None and self._thread.is_alive():
            if closing.is_set() or time.monotonic() > deadline_s:
                return
            self._thread.join(0.1)

    def _store(self, parts: list[tuple[str, Path]]) -> bool:
        """Whether it is certain that they were stored.

        An error removes nothing: a commit may have been made although its answer was lost. What is then without a name,
        the service's collector finds, for it was pinned; as it is when this worker dies on the way.
        """
        is_stored = False
        freed: list[str] = []
        try:
            digests = [digest(path) for _, path in parts]
            with self.store.write() as conn:
                found = retention.pin(conn, self.holder, digests)
            if found is retention.Pin.held:
                digested = zip(parts, digests, strict=True)
                put = [(name, *self.blobs.put(path, sha256)) for (name, path), sha256 in digested]
                with self.store.write() as conn:
                    replaced = checkpoints.replace(conn, self.holder, put)
                is_stored = replaced is not None
                freed = digests if replaced is None else replaced
            # At once, not in a minute: they may be large.
            for sha256 in freed:
                retention.remove_loose(self.store, sha256, self.blobs.delete)
        except Exception as error:  # a full disk, a bucket or a database that is away
            self.log.warning(
                "a checkpoint could not be stored, or not in place of the last one", error=str(error).splitlines()[:1]
            )
        finally:
            for _, path in parts:
                path.unlink(missing_ok=True)
        return is_stored


def release(store: Store, blobs: Blobs) -> None:
    """Delete what was saved for jobs that have ended since. Raises SQLAlchemyError."""
    with store.read() as conn:
        ended = checkpoints.not_needed(conn)
    for job_id, sha256 in ended:
        with store.write() as conn:
            retention.let_go(conn, job_id, [sha256])  # first: its lock is waited for with nothing else locked
            checkpoints.forget(conn, job_id, sha256)
        try:
            retention.remove_loose(store, sha256, blobs.delete)
        except SQLAlchemyError:
            raise
        except Exception as error:  # the service's collector tries again
            structlog.get_logger(__name__).warning("a checkpoint could not be deleted", error=str(error))
