"""Reads and writes past the page cache: a file that has no name, and requests kept in flight, `depth` at a time.

    with open_unnamed(folder, 64 << 20) as file:         # the name is gone before a byte is written
        slots = Slots(count=64, bytes_each=1 << 20)      # aligned memory, as O_DIRECT wants it
        with Requests(depth=8) as requests:
            read = requests.prepare("read", file.direct, slots, offsets)
        read()                                           # slot i <- the block at offsets[i]

Deep queues use the kernel's own asynchronous I/O (io_submit, as fio's `libaio` does): all requests of a run are
prepared beforehand, and the C kernels keep them in flight. Without those Python does, with two system calls for each
batch of blocks that came; a device that answers block by block is then faster than Python. Threads with preadv and
pwritev take over where a kernel or a sandbox has no such calls; they top out early, at the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from worker.hardware.native import Kernels

Operation = Literal["read", "write"]
Offsets = NDArray[np.int64]

ALIGNMENT = mmap.PAGESIZE
HUGE_BYTES = 2 << 20
"""A huge page of x86-64, and of aarch64 with pages of 4 KiB."""
_NAME = "storage-probe"
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""machine -> numbers of io_setup, io_destroy, io_getevents, io_submit (asm/unistd.h)."""
_OPCODES = {"read": 0, "write": 1}
_REQUEST = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("descriptor", "<u4"),
        ("buffer", "<u8"),
        ("bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event_descriptor", "<u4"),
    ]
)
"""struct iocb of linux/aio_abi.h, on a little-endian machine."""
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("result2", "<i8")])


@dataclass(frozen=True)
class UnnamedFile:
    """One file, open twice: `cached` through the page cache, `direct` past it (None where that is refused)."""

    cached: int
    direct: int | None
    refusal: str | None
    """Why there is no direct access."""


@contextmanager
def open_unnamed(folder: Path, size_bytes: int) -> Iterator[UnnamedFile]:
    """A file with room for `size_bytes`, all of it reserved before anything is written, and gone when this ends.

    Raises OSError where the filesystem has no room (ENOSPC), or a quota or limit leaves none (EDQUOT, EFBIG).
    """
    path = folder / f"{_NAME}-{os.getpid()}"
    descriptors = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)]
    try:
        refusal = None
        try:
            # Opened by name, which therefore lives for two system calls.
            descriptors.append(os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
        except OSError as error:
            refusal = f"O_DIRECT is refused: {error.strerror}"
        finally:
            path.unlink()
        os.posix_fallocate(descriptors[0], 0, size_bytes)
        yield UnnamedFile(descriptors[0], descriptors[1] if refusal is None else None, refusal)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class Slots:
    """`count` buffers of `bytes_each`, aligned to pages: `array` has a row of 8-byte words for each.

    They lie in huge pages where the kernel grants them: of small ones a request of 1 MiB needs as many pieces as
    chance has scattered, and the same device gives a third or all of its rate.
    """

    def __init__(self, count: int, bytes_each: int) -> None:
        assert bytes_each % ALIGNMENT == 0
        self.count, self.bytes_each = count, bytes_each
        self._memory = mmap.mmap(-1, count * bytes_each + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(self._memory, np.uint8)
        first = -memory.ctypes.data % HUGE_BYTES
        self.array = memory[first : first + count * bytes_each].view(np.uint64).reshape(count, -1)
        self.address = int(self.array.ctypes.data)
        self.views = [row.data for row in self.array.view(np.uint8)]


class Requests:
    """Runs reads and writes with up to `depth` of them in flight."""

    def __init__(self, depth: int, *, asynchronous: bool = True, kernels: Kernels | None = None) -> None:
        """`asynchronous=False` takes threads even where the kernel has asynchronous I/O."""
        self.depth, self._kernels = depth, kernels
        self._context = _setup(depth) if asynchronous and depth > 1 else None
        self._threads = ThreadPoolExecutor(depth) if self._context is None and depth > 1 else None

    @property
    def method(self) -> str:
        """What keeps the requests in flight."""
        if self.depth == 1:
            return "preadv/pwritev, one request at a time"
        if self._context is not None:
            looped = "in C" if self._kernels is not None else "in Python, which limits small requests"
            return f"kernel AIO (io_submit), one thread, {self.depth} requests in flight, kept so {looped}"
        return f"{self.depth} threads with preadv/pwritev (no kernel AIO here: Python's lock limits small requests)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._context is not None:
            _call(_CALLS[platform.machine()][1], self._context)  # returns once nothing is in flight any more
            self._context = None
        if self._threads is not None:
            self._threads.shutdown()

    def prepare(self, operation: Operation, descriptor: int, slots: Slots, offsets: Offsets) -> Callable[[], None]:
        """What moves slot i from or to `offsets[i]` (bytes) for every i when it is called.

        It raises OSError where a request fails or moves less than all of its block.
        """
        assert len(offsets) <= slots.count
        if self._context is not None:
            return _Asynchronous(self._context, self.depth, operation, descriptor, slots, offsets, self._kernels).run
        return _Synchronous(self._threads, self.depth, operation, descriptor, slots, offsets).run


class _Synchronous:
    def __init__(
        self,
        threads: ThreadPoolExecutor | None,
        depth: int,
        operation: Operation,
        descriptor: int,
        slots: Slots,
        offsets: Offsets,
    ) -> None:
        self._threads, self._depth, self._descriptor = threads, depth, descriptor
        self._move = os.preadv if operation == "read" else os.pwritev
        self._bytes_each = slots.bytes_each
        self._todo = [([view], int(offset)) for view, offset in zip(slots.views, offsets, strict=False)]

    def run(self) -> None:
        if self._threads is None:
            self._some(self._todo)
            return
        shares = [self._todo[first :: self._depth] for first in range(self._depth)]
        for done in [self._threads.submit(self._some, share) for share in shares]:
            done.result()

    def _some(self, todo: list[tuple[list[memoryview], int]]) -> None:
        for buffers, offset in todo:
            moved = self._move(self._descriptor, buffers, offset)
            if moved != self._bytes_each:
                raise _short(moved, self._bytes_each)


class _Asynchronous:
    def __init__(
        self,
        context: int,
        depth: int,
        operation: Operation,
        descriptor: int,
        slots: Slots,
        offsets: Offsets,
        kernels: Kernels | None,
    ) -> None:
        self._context, self._depth, self._slots, self._kernels = context, depth, slots, kernels
        self._count = count = len(offsets)
        self._requests = requests = np.zeros(count, _REQUEST)
        requests["opcode"], requests["descriptor"] = _OPCODES[operation], descriptor
        requests["buffer"] = slots.address + slots.bytes_each * np.arange(count, dtype=np.uint64)
        requests["bytes"], requests["offset"] = slots.bytes_each, offsets
        self._pointers = requests.ctypes.data + _REQUEST.itemsize * np.arange(count, dtype=np.uint64)
        self._events = np.zeros(count, _EVENT)

    def run(self) -> None:
        if self._kernels is not None:
            self._kernels.keep_in_flight(self._context, self._depth, self._pointers, self._events)
        else:
            self._keep_in_flight()
        results = self._events["result"]
        for result in results[results != self._slots.bytes_each][:1]:
            raise OSError(-result, os.strerror(-result)) if result < 0 else _short(int(result), self._slots.bytes_each)

    def _keep_in_flight(self) -> None:
        _, _, get_events, submit = _CALLS[platform.machine()]
        context, depth, count = self._context, self._depth, self._count
        pointers, events = int(self._pointers.ctypes.data), int(self._events.ctypes.data)
        begun = done = 0
        failure: OSError | None = None
        while done < count and (failure is None or done < begun):
            room = min(depth - (begun - done), count - begun)
            if room and failure is None:
                try:
                    begun += _call(submit, context, room, pointers + 8 * begun)
                except OSError as error:  # what is in flight still writes into our memory: wait for it first
                    failure = error
                    continue
            done += _call(get_events, context, 1, begun - done, events + _EVENT.itemsize * done)
        if failure is not None:
            raise failure


def _short(moved: int, wanted: int) -> OSError:
    return OSError(errno.EIO, f"a request moved {moved} of {wanted} bytes")


def _setup(depth: int) -> int | None:
    """A context for so many requests in flight; None where this machine has no such thing, or forbids it."""
    if sys.platform != "linux" or sys.byteorder != "little" or platform.machine() not in _CALLS:
        return None
    context = ctypes.c_ulong(0)
    with suppress(OSError):
        _call(_CALLS[platform.machine()][0], depth, ctypes.addressof(context))
        return context.value
    return None


def _call(number: int, *arguments: int) -> int:
    """A system call, begun again where a signal broke it off. Raises OSError."""
    padded = [*arguments, *[0] * (5 - len(arguments))]
    while (result := int(_syscall()(number, *padded))) < 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return result


@cache
def _syscall() -> Any:
    """libc's syscall(2)."""
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.argtypes, function.restype = [ctypes.c_long] * 6, ctypes.c_long
    return function
