"""Bytes that jobs made: content-addressed by SHA-256, in a local folder or an S3 bucket, by URL alone.

    blobs = Blobs("file:///srv/torchstone/artifacts")
    sha256, size = blobs.put(Path("script.pt"))           # written atomically; the same bytes are kept once
    async for chunk in blobs.stream(sha256, 0, size): ...

Which job names which bytes is in the `artifacts` table (`named`, `all_of`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import LocalStore, from_url
from sqlalchemy import Connection, select

from torchstone.errors import Gone, SetupError, Unavailable
from torchstone.store.schema import artifacts

CHUNK_BYTES = 1 << 20
_HOUR_S = 3600.0
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=60)}
"""Of a request to a bucket; each is waited for 30 s. (obstore would go on for three minutes.)"""


class Blobs:
    """The store of artifact bytes, by their SHA-256.

    Every call raises Unavailable, in one line, where the folder or bucket cannot be reached or refuses the credentials
    (those are the environment's: AWS_ACCESS_KEY_ID and the like, as for the AWS tools).
    """

    def __init__(self, artifacts_url: str) -> None:
        try:
            url = urlsplit(artifacts_url)
            self._folder = Path(unquote(url.path)) if url.scheme == "file" else None
            self._store: Any = (
                LocalStore.from_url(artifacts_url, mkdir=True)
                if self._folder
                else from_url(artifacts_url, retry_config=_RETRIES)
            )
        except Exception as error:
            told = f"artifacts URL {artifacts_url!r} cannot be opened: {_first_line(str(error))}"
            raise SetupError(re.sub(r"//[^/@]*@", "//", told)) from None  # without a password

    @property
    def is_local(self) -> bool:
        """Whether it is a folder, whose faults do not pass by themselves."""
        return self._folder is not None

    def put(self, path: Path, sha256: str | None = None) -> tuple[str, int]:
        """Store the file at `path`: its SHA-256 in hex (computed unless it is given) and its size in bytes."""
        sha256 = sha256 or digest(path)
        size = path.stat().st_size
        if self.size(sha256) != size:
            with _readable(creates=True):
                # obstore writes to a temporary name (or a multipart upload) and renames: never half a blob.
                obstore.put(self._store, _key(sha256), path)
            if self._folder is not None:
                _make_safe(self._folder / _key(sha256), self._folder)
        return sha256, size

    def size(self, sha256: str) -> int | None:
        """Bytes of a blob; None if it is not there."""
        try:
            with _readable():
                return int(obstore.head(self._store, _key(sha256))["size"])
        except FileNotFoundError:
            return None

    async def stream(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes [start, end) in chunks of about a MiB; at no time are they all in memory.

        Raises Gone when they are not in the store any more.
        """
        for offset in range(start, end, CHUNK_BYTES):
            try:
                with _readable():
                    last = min(offset + CHUNK_BYTES, end)
                    got = await obstore.get_range_async(self._store, _key(sha256), start=offset, end=last)
                    chunk = bytes(got)
            except FileNotFoundError:
                raise Gone(f"the bytes with SHA-256 {sha256} are no longer in the artifact store") from None
            except Unavailable:
                size = await asyncio.to_thread(self.size, sha256)
                if size is None or size >= last:
                    raise
                chunk = b""
            if len(chunk) != last - offset:
                raise Gone(f"the bytes with SHA-256 {sha256} are damaged: the store has fewer than were put there")
            yield chunk

    def fetch(self, sha256: str, into: Path) -> None:
        """Write a blob to the file `into`. Raises Gone where it is not there, ValueError where its bytes are others."""
        digest = hashlib.sha256()
        with into.open("wb") as file:
            try:
                with _readable():
                    for chunk in obstore.get(self._store, _key(sha256)).stream(min_chunk_size=CHUNK_BYTES):
                        digest.update(chunk)
                        file.write(chunk)
            except FileNotFoundError:
                raise Gone(f"the bytes with SHA-256 {sha256} are no longer in the artifact store") from None
        if digest.hexdigest() != sha256:
            raise ValueError(f"the bytes stored under SHA-256 {sha256} are damaged: theirs is {digest.hexdigest()}")

    def reachable(self) -> bool:
        """Whether blobs can be put and read now; a bucket that cannot be reached raises Unavailable."""
        if self._folder is not None:
            return self._folder.is_dir() and os.access(self._folder, os.R_OK | os.W_OK | os.X_OK)
        with _readable():  # a bucket that is not there has no blobs either: only a listing tells
            next(iter(obstore.list(self._store, prefix="sha256/00", chunk_size=1)), None)
        return True

    def delete(self, sha256: str) -> None:
        """Remove a blob that no job names any more; one that is not there is fine, as it is in a bucket."""
        with contextlib.suppress(FileNotFoundError), _readable():
            obstore.delete(self._store, _key(sha256))

    def sweep(self, older_than_s: float = _HOUR_S) -> int:
        """Remove what puts that were killed have left in the folder, so long ago that none still writes it; how many.

        A bucket does that by a rule of its own for unfinished uploads.
        """
        before_s, swept = time.time() - older_than_s, 0
        for path in self._folder.glob("sha256/*/*#*") if self._folder else ():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before_s:
                    path.unlink()
                    swept += 1
        return swept


def _make_safe(file: Path, top: Path) -> None:
    """Have a new file, and its name in every folder up to `top`, survive a power failure: a row is to name it next."""
    _sync(file)
    for folder in itertools.takewhile(lambda each: each != top.parent, file.parents):
        with contextlib.suppress(OSError):  # not every file system does that for a folder
            _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _readable(creates: bool = False) -> Iterator[None]:
    """A blob that is not there is a FileNotFoundError, in a folder as in a bucket; every other trouble one line.

    `creates`: the blob need not be there; what then is not found is the bucket.
    """
    try:
        yield
    except (BaseError, FileNotFoundError) as error:  # of what is not found obstore raises the one or the other
        told = str(error)
        if (
            isinstance(error, NotFoundError | FileNotFoundError)
            and not creates
            and not any(word in told for word in _NO_BUCKET)
        ):
            raise FileNotFoundError(_first_line(told)) from None
        raise Unavailable(f"the artifact store cannot be used: {_first_line(told)}") from None


def _first_line(told: str) -> str:
    """What obstore says, without the innards of its client and the XML of the server that follow."""
    return told.strip().partition("\n")[0].partition("<?xml")[0].strip(" :")[:500]


def _key(sha256: str) -> str:
    return f"sha256/{sha256[:2]}/{sha256}"


def all_of(conn: Connection, job_id: str) -> list[dict[str, Any]]:
    """The artifacts of a job by name: name, media_type, bytes, sha256, created_us."""
    query = select(artifacts).where(artifacts.c.job_id == job_id).order_by(artifacts.c.name)
    return [dict(row) for row in conn.execute(query).mappings()]


def named(conn: Connection, job_id: str, name: str) -> dict[str, Any] | None:
    """One artifact's row, or None."""
    query = select(artifacts).where(artifacts.c.job_id == job_id, artifacts.c.name == name)
    row = conn.execute(query).mappings().first()
    return dict(row) if row else None
