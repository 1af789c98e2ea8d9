"""Artifact bytes in a local folder, through the same calls as in a bucket."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.torchstone.processes import wait_until
from torchstone.errors import Gone, SetupError
from torchstone.store.artifacts import CHUNK_BYTES, Blobs


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs((tmp_path / "a folder" / "blobs").as_uri())


def a_file(folder: Path, data: bytes, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def kept(folder: Path) -> list[Path]:
    return [path for path in (folder / "a folder" / "blobs").rglob("*") if path.is_file()]


def read(blobs: Blobs, sha256: str, start: int, end: int) -> bytes:
    async def collect() -> bytes:
        chunks = [chunk async for chunk in blobs.stream(sha256, start, end)]
        assert all(0 < len(chunk) <= CHUNK_BYTES for chunk in chunks)
        return b"".join(chunks)

    return asyncio.run(collect())


def test_bytes_come_back_by_their_hash_whole_and_in_ranges(blobs: Blobs, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(3 * CHUNK_BYTES + 17)
    sha256, size = blobs.put(a_file(tmp_path, data))
    assert (sha256, size) == (hashlib.sha256(data).hexdigest(), len(data))
    assert blobs.size(sha256) == size
    for start, end in [
        (0, size),
        (0, 1),
        (size - 1, size),
        (CHUNK_BYTES - 1, CHUNK_BYTES + 1),
        (5, 2 * CHUNK_BYTES + 5),
        (7, 7),
    ]:
        assert read(blobs, sha256, start, end) == data[start:end]


def test_a_blob_is_fetched_into_a_file_and_damage_is_seen(blobs: Blobs, tmp_path: Path) -> None:
    data, into = random.Random(0).randbytes(2 * CHUNK_BYTES + 17), tmp_path / "fetched"
    sha256, _ = blobs.put(a_file(tmp_path, data))
    blobs.fetch(sha256, into)
    assert into.read_bytes() == data
    [blob] = kept(tmp_path)
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="damaged"):
        blobs.fetch(sha256, into)
    blobs.delete(sha256)
    with pytest.raises(Gone):
        blobs.fetch(sha256, into)


def test_an_empty_file_is_an_artifact_too(blobs: Blobs, tmp_path: Path) -> None:
    sha256, size = blobs.put(a_file(tmp_path, b""))
    assert size == blobs.size(sha256) == 0
    assert read(blobs, sha256, 0, 0) == b""


def test_the_same_bytes_are_kept_once(blobs: Blobs, tmp_path: Path) -> None:
    first = blobs.put(a_file(tmp_path, b"same"))
    [path] = kept(tmp_path)
    before = path.stat()
    assert blobs.put(a_file(tmp_path, b"same", "another name")) == first
    assert kept(tmp_path) == [path]
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert path.name == first[0]


def test_half_a_blob_from_a_crash_is_replaced(blobs: Blobs, tmp_path: Path) -> None:
    file = a_file(tmp_path, b"whole")
    sha256, _ = blobs.put(file)
    [path] = kept(tmp_path)
    path.write_bytes(b"who")
    blobs.put(file)
    assert read(blobs, sha256, 0, 5) == b"whole"


def test_nobody_ever_sees_half_a_blob(blobs: Blobs, tmp_path: Path) -> None:
    """Many put the same bytes while others ask for them: not there, or all there."""
    data = random.Random(1).randbytes(20 * CHUNK_BYTES)
    sha256 = hashlib.sha256(data).hexdigest()
    files = [a_file(tmp_path, data, f"file {i}") for i in range(4)]
    done = threading.Event()
    seen: set[int | None] = set()

    def look() -> None:
        while not done.is_set():
            seen.add(blobs.size(sha256))

    watcher = threading.Thread(target=look)
    watcher.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(blobs.put, files))
    done.set()
    watcher.join()
    assert seen <= {None, len(data)}
    assert blobs.size(sha256) == len(data)
    assert len(kept(tmp_path)) == 1


def test_what_a_killed_put_left_is_swept_away_and_nothing_else(blobs: Blobs, tmp_path: Path) -> None:
    """A process of its own puts a large file and is killed amid it."""
    sha256, _ = blobs.put(a_file(tmp_path, b"whole"))
    [whole] = kept(tmp_path)
    large = a_file(tmp_path, b"", "large")
    os.truncate(large, 4 << 30)  # sparse: reading it takes a second or more
    script = (
        "import sys; from pathlib import Path; from torchstone.store.artifacts import Blobs; "
        "Blobs(sys.argv[1]).put(Path(sys.argv[2]), 'f' * 64)"
    )
    url = (tmp_path / "a folder" / "blobs").as_uri()
    process = subprocess.Popen([sys.executable, "-c", script, url, str(large)])
    wait_until(lambda: len(kept(tmp_path)) == 2 or process.poll() is not None, within_s=60)
    process.kill()
    process.wait()
    [left] = [path for path in kept(tmp_path) if path != whole]
    assert "#" in left.name, "it was killed before the file was whole"
    assert blobs.sweep() == 0, "another process may still be at work on it"
    os.utime(left, (0, 0))
    os.utime(whole, (0, 0))
    assert blobs.sweep() == 1
    assert kept(tmp_path) == [whole] and blobs.size(sha256) == 5


@pytest.mark.parametrize("kept_bytes", [0, 10])
def test_a_blob_that_lost_its_end_is_damaged_and_not_short(blobs: Blobs, tmp_path: Path, kept_bytes: int) -> None:
    data = random.Random(3).randbytes(100)
    sha256, size = blobs.put(a_file(tmp_path, data))
    [path] = kept(tmp_path)
    path.write_bytes(data[:kept_bytes])
    for start in (0, 50):
        with pytest.raises(Gone, match="damaged"):
            read(blobs, sha256, start, size)


def test_a_password_in_the_url_is_not_shown() -> None:
    with pytest.raises(SetupError, match="cannot be opened") as told:
        Blobs("ftp://user:hunter2@host/folder")
    assert "hunter2" not in str(told.value) and "\n" not in str(told.value)


def test_what_is_not_there_says_so(blobs: Blobs) -> None:
    missing = "0" * 64
    assert blobs.size(missing) is None
    with pytest.raises(Gone, match=missing):
        read(blobs, missing, 0, 10)


def test_deleted_is_gone(blobs: Blobs, tmp_path: Path) -> None:
    sha256, _ = blobs.put(a_file(tmp_path, b"x"))
    blobs.delete(sha256)
    assert blobs.size(sha256) is None
    blobs.delete(sha256)  # once more is harmless


@pytest.mark.parametrize("url", ["", "no-such-scheme://x", "just a path"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="cannot be opened"):
        Blobs(url)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    a_file(tmp_path, b"", "in the way")
    with pytest.raises(SetupError, match="cannot be opened"):
        Blobs((tmp_path / "in the way" / "blobs").as_uri())


def test_the_file_descriptor_count_does_not_grow(blobs: Blobs, tmp_path: Path) -> None:
    sha256, size = blobs.put(a_file(tmp_path, b"abc"))
    fds = Path("/proc/self/fd")
    if not fds.exists():
        pytest.skip("only Linux lists them")
    read(blobs, sha256, 0, size)
    before = len(list(fds.iterdir()))
    for _ in range(50):
        read(blobs, sha256, 0, size)
    assert len(list(fds.iterdir())) <= before + 2
