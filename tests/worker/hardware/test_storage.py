"""Storage: what is moved is what was meant, a full disk is not made, and no file is left."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from tests.worker.fresh import call_fresh
from tests.worker.hardware.probing import bench_in, recompute, run_probe
from worker.hardware import native, storage
from worker.hardware.direct_io import Requests, Slots, open_unnamed
from worker.hardware.filesystem import Filesystem, _mount_of
from worker.hardware.probe import ProbeBench, ProbeReport

BLOCK = storage.BLOCK_BYTES
MEMORY = Path("/dev/shm")


def _direct(folder: Path) -> int:
    """Skips where this machine's test folder has no O_DIRECT."""
    with open_unnamed(folder, BLOCK) as file:
        if file.direct is None:
            pytest.skip(f"{folder}: {file.refusal}")
    return 0


def _kernels() -> native.Kernels:
    kernels = native.load()
    if isinstance(kernels, native.Missing):
        pytest.skip(kernels.reason)
    return kernels


@pytest.mark.parametrize("way", ["C", "python", "threads"])
@pytest.mark.parametrize("depth", [1, 4])
def test_requests_move_each_block_to_its_place(tmp_path: Path, depth: int, way: str) -> None:
    _direct(tmp_path)
    count = 24
    order = np.random.default_rng(0).permutation(count)
    words = np.random.default_rng(1).integers(0, 2**64, (count, BLOCK // 8), np.uint64)
    slots = Slots(count, BLOCK)
    requests = Requests(depth, asynchronous=way != "threads", kernels=_kernels() if way == "C" else None)
    with open_unnamed(tmp_path, count * BLOCK) as file, requests:
        assert file.direct is not None
        slots.array[:] = words[order]
        requests.prepare("write", file.direct, slots, order * BLOCK)()
        assert os.pread(file.cached, count * BLOCK, 0) == words.tobytes()
        slots.array[:] = 0
        requests.prepare("read", file.direct, slots, np.arange(count) * BLOCK)()
        assert (slots.array == words).all()


@pytest.mark.parametrize("way", ["C", "python"])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_read_past_the_end_is_no_short_success(tmp_path: Path, depth: int, way: str) -> None:
    _direct(tmp_path)
    requests = Requests(depth, kernels=_kernels() if way == "C" else None)
    with open_unnamed(tmp_path, BLOCK) as file, requests:
        assert file.direct is not None
        read = requests.prepare("read", file.direct, Slots(2, BLOCK), np.array([0, BLOCK]))
        with pytest.raises(OSError, match="moved 0 of 4096 bytes"):
            read()


@pytest.mark.parametrize("way", ["C", "python"])
@pytest.mark.parametrize("depth", [1, 4])
def test_the_kernels_own_refusal_is_raised(tmp_path: Path, depth: int, way: str) -> None:
    (tmp_path / "read-only").write_bytes(bytes(2 * BLOCK))
    requests = Requests(depth, kernels=_kernels() if way == "C" else None)
    with (tmp_path / "read-only").open("rb") as file, requests:
        write = requests.prepare("write", file.fileno(), Slots(2, BLOCK), np.array([0, BLOCK]))
        with pytest.raises(OSError, match="Bad file descriptor"):
            write()


def test_the_file_has_no_name_and_is_gone_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_unnamed(tmp_path, 8 * BLOCK) as file:
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(file.cached).st_nlink == 0
        raise RuntimeError
    with pytest.raises(OSError):
        os.fstat(file.cached)
    with pytest.raises(OSError) as refused, open_unnamed(tmp_path, 1 << 62):
        pass
    assert refused.value.errno in (errno.ENOSPC, errno.EFBIG, errno.EINVAL)
    assert list(tmp_path.iterdir()) == []


def test_one_wrong_bit_is_found(tmp_path: Path) -> None:
    with open_unnamed(tmp_path, storage.LEAST_FILE_BYTES) as file:
        drive = storage.Drive(bench_in(tmp_path), file, storage.LEAST_FILE_BYTES)
        drive.lay_out(10.0, direct=False)
        drive.read_back(direct=False)
        assert (drive.faults, drive.compared_bytes) == (0, storage.LEAST_FILE_BYTES)
        (byte,) = os.pread(file.cached, 1, 5 * BLOCK + 17)
        os.pwrite(file.cached, bytes([byte ^ 4]), 5 * BLOCK + 17)
        # Two blocks that changed places hold what was written, in the wrong place.
        seventh, eighth = os.pread(file.cached, BLOCK, 7 * BLOCK), os.pread(file.cached, BLOCK, 8 * BLOCK)
        os.pwrite(file.cached, eighth + seventh, 7 * BLOCK)
        drive.read_back(direct=False)
        assert drive.faults == 3


def test_a_block_written_again_holds_something_else() -> None:
    content, block = storage.Content(4, seed=0), np.array([2])
    old, new = np.empty((1, 512), np.uint64), np.empty((1, 512), np.uint64)
    content.fill(old, block)
    content.next(block)
    content.fill(new, block)
    assert not (old == new).any()
    assert (content.faults(new, block), content.faults(old, block)) == (0, 1)


def test_all_figures_and_nothing_left(tmp_path: Path) -> None:
    _direct(tmp_path)
    report = run_probe("storage", bench_in(tmp_path))
    assert report.skipped == []
    recompute(report)
    found = {(reading.name, reading.at.get("depth")) for reading in report.readings}
    for order, deep in (("sequential", 8), ("random", 16)):
        for operation in ("read", "write"):
            assert {(f"{order}_{operation}", 1), (f"{order}_{operation}", deep)} <= found
    assert {("cached_sequential_read", 1), ("fsync_append", None), ("fdatasync_overwrite", None)} <= found
    for reading in report.readings:
        if "depth" in reading.at:
            assert ("O_DIRECT" in reading.method) == ("cached" not in reading.name)
    assert [check.passed for check in report.checks] == [True, True]
    assert report.facts["type"] and report.facts["file_bytes"] >= storage.LEAST_FILE_BYTES


@pytest.mark.skipif(not MEMORY.is_dir() or not Filesystem.of(MEMORY).is_in_memory, reason="/dev/shm is no tmpfs here")
def test_memory_is_not_taken_for_a_disk(tmp_path: Path) -> None:
    folder = MEMORY / f"torchstone-test-{os.getpid()}"
    folder.mkdir()
    try:
        report = run_probe("storage", bench_in(folder))
    finally:
        folder.rmdir()
    assert {reading.name.startswith("cached_") for reading in report.readings} == {True}
    (skip,) = report.skipped
    assert skip.of == "storage.direct" and "tmpfs keeps files in memory" in skip.reason


def _under_a_limit(bench: ProbeBench, limit_bytes: int) -> ProbeReport:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    return storage.run(bench)


def test_a_limit_on_files_is_a_refusal(tmp_path: Path) -> None:
    report = call_fresh(_under_a_limit, bench_in(tmp_path), 1 << 20)
    (skip,) = report.skipped
    assert "files may only have 1 MB here (RLIMIT_FSIZE)" in skip.reason
    assert report.readings == [] and list(tmp_path.iterdir()) == []


def _disk(total: int, free: int) -> Filesystem:
    return Filesystem("/data", "ext4", "/dev/sda", total, free, None, {})


def test_a_disk_that_is_nearly_full_is_left_alone() -> None:
    mega, giga = 10**6, 10**9
    assert _disk(200 * giga, 100 * giga).room_bytes == 100 * giga - (1 << 30)
    assert _disk(10 * giga, 3 * giga).room_bytes == 3 * giga - giga // 2
    small = _disk(2 * giga, 280 * mega)
    assert small.room_bytes == 280 * mega - (256 << 20) < storage.LEAST_FILE_BYTES
    assert "280 MB of 2000 MB are free and 268 MB of them stay so" in small.why_no_room(storage.LEAST_FILE_BYTES)
    assert _disk(2 * giga, 100 * mega).room_bytes == 0


def test_the_deepest_mount_is_the_folders() -> None:
    text = (
        "21 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "22 21 0:5 / /data rw - overlay overlay rw\n"
        "23 22 0:6 / /data/with\\040space rw shared:1 - xfs /dev/sdb rw\n"
        "24 21 0:7 / /data rw - btrfs /dev/sdc rw\n"
    )
    assert _mount_of(Path("/data/with space/x"), text) == ("xfs", "/dev/sdb")
    assert _mount_of(Path("/data/other"), text) == ("btrfs", "/dev/sdc")
    assert _mount_of(Path("/database"), text) == ("ext4", "/dev/vda")
