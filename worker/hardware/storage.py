"""Probe `storage`: the folder that results are written to, past the page cache; through it, apart and named so; fsync.

Figures: `sequential_read`, `sequential_write` (blocks of 1 MiB) and `random_read`, `random_write` (4 KiB), at the queue
depths of `at.depth`; at depth 1 also `read_latency`, `write_latency`; then `cached_...` for the same through the page
cache, which measures memory; `fsync_append` and `fdatasync_overwrite` for what a database or a checkpoint pays.

O_DIRECT passes this kernel's page cache only: a cache in the device, its controller or a hypervisor still answers, and
the file (256 MiB at most) may fit in it. Every block says which block of which generation it is: all that is read is
compared outside the clock, all that was written is read back. Where there is no O_DIRECT, or no device behind the
folder, only the cached figures are had; a file that would fill the disk is not begun.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.hardware import native
from worker.hardware.direct_io import Offsets, Operation, Requests, Slots, UnnamedFile, open_unnamed
from worker.hardware.filesystem import Filesystem
from worker.hardware.probe import FEWEST_REPEATS, MOST_REPEATS, ProbeBench, ProbeReport, Repeats

FILE_BYTES = 256 << 20
LEAST_FILE_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20
BLOCK_BYTES = 4096
DEEP = {CHUNK_BYTES: 8, BLOCK_BYTES: 16}
"""The deeper queue, by block size."""
_RUN_BYTES = {CHUNK_BYTES: 64 << 20, BLOCK_BYTES: 16 << 20}
"""Most that one timed run moves: all of it has a place of its own in memory, to be compared."""
_RUN_SHARE = 0.12
"""Of a part's time: one run of it."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GOLDEN, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9

Words = NDArray[np.uint64]


def run(bench: ProbeBench) -> ProbeReport:
    """Measure the storage below `bench.folder`."""
    report = ProbeReport("storage")
    where = Filesystem.of(bench.folder)
    report.facts.update(where.facts())
    size_bytes = min(FILE_BYTES, where.room_bytes, bench.memory_bytes // 4) // LEAST_FILE_BYTES * LEAST_FILE_BYTES
    if size_bytes == 0:
        report.skip("storage", where.why_no_room(LEAST_FILE_BYTES))
        return report
    try:
        with open_unnamed(bench.folder, size_bytes) as file:
            _measure(bench, report, where, Drive(bench, file, size_bytes))
        if not where.is_in_memory:
            _measure_fsync(bench, report)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        report.skip("storage", f"{bench.folder} has no room for {size_bytes / 1e6:.0f} MB: {error.strerror}")
    return report


def _measure(bench: ProbeBench, report: ProbeReport, where: Filesystem, drive: Drive) -> None:
    refusal = drive.file.refusal
    if where.is_in_memory:
        refusal = f"{where.type} keeps files in memory: there is no device to measure"
    part_s = bench.budget_s * (0.07 if refusal is None else 0.15)
    bench.progress("storage: laying out the file")
    drive.lay_out(bench.budget_s * 0.2, direct=refusal is None)
    report.facts["file_bytes"] = drive.size_bytes
    if refusal is None:
        for block_bytes in (CHUNK_BYTES, BLOCK_BYTES):
            for depth in (1, DEEP[block_bytes]):
                for operation in ("read", "write"):
                    drive.time(report, operation, block_bytes, depth, part_s, direct=True)
    else:
        report.skip("direct", f"{refusal}; the cached figures are all there is")
    for operation, block_bytes in (("write", CHUNK_BYTES), ("read", CHUNK_BYTES), ("read", BLOCK_BYTES)):
        drive.time(report, operation, block_bytes, 1, part_s / 2, direct=False)  # type: ignore[arg-type]
    bench.progress("storage: reading everything back")
    os.fsync(drive.file.cached)
    drive.read_back(direct=refusal is None)
    report.check(
        "content",
        drive.faults == 0,
        "what was written",
        f"{drive.compared_bytes} bytes compared, {drive.faults} blocks of {BLOCK_BYTES} bytes were not as written",
    )


class Content:
    """What each block holds: random words of its own, which tell the block and how often it was written."""

    def __init__(self, blocks: int, seed: int) -> None:
        self._base = np.random.default_rng(seed).integers(0, 2**64, BLOCK_BYTES // 8, np.uint64)
        self._generation = np.zeros(blocks, np.uint64)

    def next(self, blocks: Offsets) -> None:
        """These blocks are written anew."""
        self._generation[blocks] += np.uint64(1)

    def fill(self, words: Words, blocks: Offsets) -> None:
        """Put what `blocks` (numbers of 4 KiB blocks) hold into `words`: (blocks, 512)."""
        for piece in _pieces(len(blocks)):
            np.bitwise_xor(self._base, self._stamps(blocks[piece]), out=words[piece])

    def faults(self, words: Words, blocks: Offsets) -> int:
        """How many of `blocks` are not in `words` as they should be."""
        right = 0
        for piece in _pieces(len(blocks)):
            same = (words[piece] ^ self._stamps(blocks[piece])) == self._base
            right += int(same.all(axis=1).sum())
        return len(blocks) - right

    def _stamps(self, blocks: Offsets) -> Words:
        # As in splitmix64: neighbours differ in half of their bits, so nothing on the way can compress them.
        word = (blocks.astype(np.uint64) + (self._generation[blocks] << np.uint64(40))) * np.uint64(_GOLDEN)
        stamps: Words = ((word ^ (word >> np.uint64(30))) * np.uint64(_MIX))[:, None]
        return stamps


@dataclass
class _Run:
    """One timed run: which blocks go where."""

    operation: Operation
    slots: Slots
    offsets: Offsets
    move: Callable[[], None]


class Drive:
    """The scratch file and what it should hold."""

    def __init__(self, bench: ProbeBench, file: UnnamedFile, size_bytes: int) -> None:
        self.file, self.size_bytes = file, size_bytes
        self.faults = self.compared_bytes = 0
        self._bench = bench
        kernels = native.load(scratch=bench.folder)
        self._kernels = None if isinstance(kernels, native.Missing) else kernels
        self._content = Content(size_bytes // BLOCK_BYTES, bench.seed)
        self._random = np.random.default_rng(bench.seed)
        most_bytes = max(16 * CHUNK_BYTES, bench.memory_bytes // 16)
        self._slots = {
            block_bytes: Slots(min(run_bytes, most_bytes) // block_bytes, block_bytes)
            for block_bytes, run_bytes in _RUN_BYTES.items()
        }
        self._next_chunk = 0

    def lay_out(self, budget_s: float, *, direct: bool) -> None:
        """Write the file once, or as much of it (32 MiB at least) as the time allows: `size_bytes` is that."""
        wanted, written = self.size_bytes, 0
        piece = LEAST_FILE_BYTES // CHUNK_BYTES
        slots = Slots(piece, CHUNK_BYTES)
        end_s = time.perf_counter() + budget_s
        with self._requests(DEEP[CHUNK_BYTES] if direct else 1) as requests:
            while written < wanted and (written == 0 or time.perf_counter() < end_s):
                run = self._prepare(requests, "write", slots, written + CHUNK_BYTES * np.arange(piece), direct)
                run.move()
                written += LEAST_FILE_BYTES
        os.fsync(self.file.cached)
        self.size_bytes = written

    def time(
        self,
        report: ProbeReport,
        operation: Operation,
        block_bytes: int,
        depth: int,
        budget_s: float,
        *,
        direct: bool,
    ) -> None:
        """Add the rate of one kind of access; at depth 1 its latency too."""
        order = "sequential" if block_bytes == CHUNK_BYTES else "random"
        self._bench.progress(f"storage: {'' if direct else 'cached '}{order} {operation}, depth {depth}")
        if direct:
            os.posix_fadvise(self.file.cached, 0, 0, os.POSIX_FADV_DONTNEED)
        with self._requests(depth) as requests:
            count = self._requests_a_run(requests, operation, block_bytes, budget_s * _RUN_SHARE, direct)
            took = self._repeat(requests, operation, block_bytes, count, budget_s * (1 - _RUN_SHARE), direct)
            buffers = "one buffer" if self._at_once(requests, operation, block_bytes, count, direct) == 1 else "buffers"
            method = (
                f"{requests.method}, blocks of {block_bytes} bytes, {buffers} in huge pages if granted; "
                f"the bytes {operation} count once"
            )
        cached = "" if direct else "cached_"
        method = f"{'O_DIRECT' if direct else 'through the page cache, which is memory'}; {method}"
        if operation == "write":
            method += ", written over what was there" + ("" if direct else ", not yet on the device")
        at = {"block_bytes": block_bytes, "depth": depth}
        report.rate(
            f"{cached}{order}_{operation}",
            took,
            bytes=count * block_bytes,
            count=count,
            method=method,
            at=at,
            working_set_bytes=self.size_bytes,
            statistic="median",
        )
        if depth == 1:
            report.latency(
                f"{cached}{operation}_latency",
                took,
                bytes=count * block_bytes,
                count=count,
                method=f"{method}; mean of a run",
                at=at,
                working_set_bytes=self.size_bytes,
            )
        if not direct and operation == "write":
            os.fsync(self.file.cached)

    def read_back(self, *, direct: bool) -> None:
        """Compare the whole file."""
        slots = self._slots[CHUNK_BYTES]
        with self._requests(DEEP[CHUNK_BYTES] if direct else 1) as requests:
            for first in range(0, self.size_bytes // CHUNK_BYTES, slots.count):
                numbers = np.arange(first, min(first + slots.count, self.size_bytes // CHUNK_BYTES))
                run = self._prepare(requests, "read", slots, numbers * CHUNK_BYTES, direct)
                run.move()
                self._compare(run)

    def _requests(self, depth: int) -> Requests:
        return Requests(depth, kernels=self._kernels)

    def _requests_a_run(
        self, requests: Requests, operation: Operation, block_bytes: int, run_s: float, direct: bool
    ) -> int:
        """How many requests take about `run_s`: few where the device is slow, as many as there is memory for."""
        most = min(self._slots[block_bytes].count, self.size_bytes // block_bytes)
        count = min(most, 4 * requests.depth)
        while True:
            run = self._prepare_next(requests, operation, block_bytes, count, direct)
            begun_s = time.perf_counter()
            run.move()
            took_s = time.perf_counter() - begun_s
            self._compare(run)
            if took_s >= run_s / 4 or count == most:
                return max(min(count, 4 * requests.depth), min(most, int(count * run_s / took_s)))
            count = min(most, 4 * count)

    def _repeat(
        self, requests: Requests, operation: Operation, block_bytes: int, count: int, budget_s: float, direct: bool
    ) -> Repeats:
        """The seconds of runs of `count` requests."""
        at_once = self._at_once(requests, operation, block_bytes, count, direct)
        rounds = count // at_once
        runs: list[_Run] = []

        def prepare() -> None:
            if runs:
                self._compare(runs.pop())
            runs.append(self._prepare_next(requests, operation, block_bytes, at_once, direct))

        took = self._bench.repeat(
            lambda: runs[-1].move(),
            budget_s=budget_s,
            at_least=FEWEST_REPEATS * rounds,
            at_most=MOST_REPEATS * rounds,
            before=prepare,
        )
        self._compare(runs.pop())
        return took.in_runs_of(rounds)

    @staticmethod
    def _at_once(requests: Requests, operation: Operation, block_bytes: int, count: int, direct: bool) -> int:
        """How many of a run's requests the clock sees at once.

        Chunks read one at a time are compared one at a time, while the clock stands: all land in the first slot, in the
        CPU's cache, as in any program that reads chunk by chunk. Into memory that no cache holds a fast device reads
        slower.
        """
        return 1 if requests.depth == 1 and operation == "read" and block_bytes == CHUNK_BYTES and direct else count

    def _prepare_next(
        self, requests: Requests, operation: Operation, block_bytes: int, count: int, direct: bool
    ) -> _Run:
        """The next `count` chunks of the file, round and round; or as many blocks drawn without repetition."""
        total = self.size_bytes // block_bytes
        if block_bytes == CHUNK_BYTES:
            numbers = (self._next_chunk + np.arange(count)) % total
            self._next_chunk = int(self._next_chunk + count) % total
        else:
            numbers = self._random.choice(total, count, replace=False)
        return self._prepare(requests, operation, self._slots[block_bytes], numbers * block_bytes, direct)

    def _prepare(self, requests: Requests, operation: Operation, slots: Slots, offsets: Offsets, direct: bool) -> _Run:
        descriptor = self.file.direct if direct else self.file.cached
        assert descriptor is not None
        if operation == "write":
            blocks = self._blocks(slots, offsets)
            self._content.next(blocks)
            self._content.fill(self._words(slots, offsets), blocks)
        else:
            slots.array[: len(offsets)] = 0
        return _Run(operation, slots, offsets, requests.prepare(operation, descriptor, slots, offsets))

    def _compare(self, run: _Run) -> None:
        """See whether what was read is what was written."""
        if run.operation == "read":
            blocks = self._blocks(run.slots, run.offsets)
            self.faults += self._content.faults(self._words(run.slots, run.offsets), blocks)
            self.compared_bytes += len(run.offsets) * run.slots.bytes_each

    @staticmethod
    def _blocks(slots: Slots, offsets: Offsets) -> Offsets:
        """The numbers of the 4 KiB blocks in the slots, one after the other."""
        inside = np.arange(slots.bytes_each // BLOCK_BYTES)
        numbers: Offsets = (offsets[:, None] // BLOCK_BYTES + inside).ravel()
        return numbers

    @staticmethod
    def _words(slots: Slots, offsets: Offsets) -> Words:
        """The slots in use, a row for each 4 KiB block."""
        return slots.array[: len(offsets)].reshape(-1, BLOCK_BYTES // 8)


def _pieces(blocks: int) -> list[slice]:
    """1 MiB at a time, which stays in the cache between one operation on it and the next."""
    step = CHUNK_BYTES // BLOCK_BYTES
    return [slice(first, first + step) for first in range(0, blocks, step)]


def _measure_fsync(bench: ProbeBench, report: ProbeReport) -> None:
    """A block added to a file and one written over, each made safe before the next: what a database does."""
    blocks = 4096
    content, slots = Content(blocks, bench.seed + 1), Slots(1, BLOCK_BYTES)
    words, faults = slots.array.reshape(1, -1), 0
    parts: tuple[tuple[str, Callable[[int], None], str], ...] = (
        ("fsync_append", os.fsync, "pwrite of 4096 bytes at the file's end through the page cache, then fsync"),
        (
            "fdatasync_overwrite",
            os.fdatasync,
            "pwrite of 4096 bytes over old ones through the page cache, then fdatasync",
        ),
    )
    for name, make_safe, method in parts:
        bench.progress(f"storage: {name}")
        # Room for the first block alone: the others make the file longer.
        with open_unnamed(bench.folder, BLOCK_BYTES) as file:
            numbers = iter(range(blocks)) if name == "fsync_append" else iter([0] * blocks)
            written: list[int] = []

            def prepare() -> None:
                written.append(next(numbers))  # noqa: B023
                content.next(np.array(written[-1:]))  # noqa: B023
                content.fill(words, np.array(written[-1:]))  # noqa: B023

            def commit() -> None:
                os.pwritev(file.cached, slots.views, written[-1] * BLOCK_BYTES)  # noqa: B023
                make_safe(file.cached)  # noqa: B023

            took = bench.repeat(commit, budget_s=bench.budget_s * 0.03, before=prepare, at_most=blocks - 1)
            report.latency(name, took, count=1, bytes=BLOCK_BYTES, method=method, at={"block_bytes": BLOCK_BYTES})
            for number in sorted(set(written)):
                os.preadv(file.cached, slots.views, number * BLOCK_BYTES)
                faults += content.faults(words, np.array([number]))
    report.check("synced_content", faults == 0, "what was written", f"{faults} blocks were not as written")
