"""Artifact bytes in a bucket of a real S3 server, through the same calls as in a folder."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3 import S3, s3_server
from torchstone.errors import Gone, Unavailable
from torchstone.store.artifacts import CHUNK_BYTES, Blobs


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def blobs(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Blobs:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return Blobs(s3.url)


def a_file(folder: Path, data: bytes, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def read(blobs: Blobs, sha256: str, start: int, end: int) -> bytes:
    async def collect() -> bytes:
        return b"".join([chunk async for chunk in blobs.stream(sha256, start, end)])

    return asyncio.run(collect())


def test_bytes_come_back_whole_in_ranges_and_as_a_file(blobs: Blobs, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(12 * CHUNK_BYTES + 17)  # put in several parts
    sha256, size = blobs.put(a_file(tmp_path, data))
    assert (sha256, size) == (hashlib.sha256(data).hexdigest(), len(data))
    assert blobs.size(sha256) == size
    for start, end in [(0, 1), (size - 1, size), (CHUNK_BYTES - 1, CHUNK_BYTES + 1), (7, 7), (0, size)]:
        assert read(blobs, sha256, start, end) == data[start:end]
    blobs.fetch(sha256, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == data
    assert blobs.put(a_file(tmp_path, data, "again")) == (sha256, size)


def test_an_empty_file_is_an_artifact_too(blobs: Blobs, tmp_path: Path) -> None:
    sha256, size = blobs.put(a_file(tmp_path, b""))
    assert size == blobs.size(sha256) == 0


def test_deleted_and_never_there_are_gone(blobs: Blobs, tmp_path: Path) -> None:
    sha256, _ = blobs.put(a_file(tmp_path, b"x"))
    blobs.delete(sha256)
    blobs.delete(sha256)  # once more is harmless
    assert blobs.size(sha256) is None
    with pytest.raises(Gone, match=sha256):
        read(blobs, sha256, 0, 1)
    with pytest.raises(Gone, match=sha256):
        blobs.fetch(sha256, tmp_path / "fetched")


def test_a_bucket_that_is_not_there_is_told(blobs: Blobs) -> None:
    assert blobs.reachable()
    elsewhere = Blobs("s3://no-such-bucket/artifacts")
    with pytest.raises((FileNotFoundError, Unavailable), match=r"no-such-bucket|NoSuchBucket"):
        elsewhere.reachable()


def test_a_wrong_key_is_refused_in_one_line(
    blobs: Blobs, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    locked_out = Blobs(s3.url)
    for call in (locked_out.reachable, lambda: locked_out.put(a_file(tmp_path, b"x"))):
        with pytest.raises(Unavailable, match="out of reach") as refused:
            call()
        assert "\n" not in str(refused.value) and "wrong" not in str(refused.value)
