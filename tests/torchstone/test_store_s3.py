"""Artifact bytes in a bucket of a real S3 server, through the same calls as in a folder."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
        with pytest.raises(Unavailable, match="cannot be used") as refused:
            call()
        assert "\n" not in str(refused.value) and "wrong" not in str(refused.value)


class _NoBucket(BaseHTTPRequestHandler):
    """Answers as AWS does where the bucket is not there; SeaweedFS makes it with the first put."""

    def do_GET(self) -> None:
        body = b"<?xml version='1.0'?><Error><Code>NoSuchBucket</Code><Message>not there</Message></Error>"
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    do_HEAD = do_POST = do_DELETE = do_GET

    def log_message(self, *words: object) -> None:
        """Nothing."""


def test_without_the_bucket_no_blob_is_said_to_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint would be thrown away, and a deletion forgotten, for a bucket that is back tomorrow."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _NoBucket)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    blobs, sha256 = Blobs("s3://bucket/artifacts"), "0" * 64
    for call in (
        lambda: read(blobs, sha256, 0, 10),
        lambda: blobs.fetch(sha256, tmp_path / "fetched"),
        lambda: blobs.delete(sha256),
        lambda: blobs.put(a_file(tmp_path, b"x")),
        blobs.reachable,
    ):
        with pytest.raises(Unavailable, match="cannot be used") as told:
            call()
        assert "<" not in str(told.value)
    server.shutdown()
    server.server_close()
