"""The C kernels (kernels.c), compiled when first used by the system's own compiler and kept in a cache folder.

    kernels = native.load()                       # Kernels, or a Missing that says why there are none
    if isinstance(kernels, Missing): report.skip("latency", kernels.reason)
    seconds = kernels.chase(cycle, steps=1 << 20)

The cache is TORCHSTONE's part of the user's own (XDG_CACHE_HOME, else ~/.cache, else the folder given): one file by the
hash of source, flags, compiler and CPU, so that another of any of them is compiled anew. Where there is no compiler the
probes measure with torch what torch can measure, and skip the rest with this reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SOURCE = Path(__file__).with_name("kernels.c")
COMPILERS = ("cc", "gcc", "clang")
FASTEST = ("-O3", "-march=native")
COMPILE_WITHIN_S = 60

Words = NDArray[np.uint64]
Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Missing:
    """Why there are no kernels."""

    reason: str


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels; arrays are passed as they lie in memory and must be contiguous."""

    library: ctypes.CDLL
    method: str
    """Compiler and flags, as published beside each figure."""

    def fill(self, a: Doubles, value: float) -> None:
        """a = value: the first touch, which decides on which NUMA node it lies."""
        self.library.fill(_at(a), ctypes.c_double(value), ctypes.c_size_t(a.size))

    def stream(
        self, a: Doubles, b: Doubles, c: Doubles, repeats: int, threads: int, gate: NDArray[np.int64]
    ) -> tuple[Doubles, Doubles]:
        """STREAM with scalar 3 by this thread, in step with the others at `gate`: when each of (repeats, 4) began and
        ended, in seconds of the monotonic clock."""
        begun, ended = np.zeros((repeats, 4)), np.zeros((repeats, 4))
        count, crew = ctypes.c_int64(repeats), ctypes.c_int64(threads)
        scalar, size = ctypes.c_double(3.0), ctypes.c_size_t(a.size)
        self.library.stream(_at(a), _at(b), _at(c), scalar, size, count, crew, _at(gate), _at(begun), _at(ended))
        return begun, ended

    def chase(self, following: Words, start: int, steps: int) -> tuple[float, int]:
        """Seconds of `steps` dependent loads from `start`, and where they end."""
        assert steps % 8 == 0
        at = ctypes.c_uint64(start)
        seconds = self.library.chase(_at(following), ctypes.byref(at), ctypes.c_uint64(steps))
        return float(seconds), at.value

    def walk(self, following: Words, steps: int) -> tuple[int, int]:
        """Where so many loads from 0 end, and the sum of all places on the way modulo 2^64."""
        total = ctypes.c_uint64()
        return self.library.walk(_at(following), ctypes.c_uint64(steps), ctypes.byref(total)), total.value

    def read_all(self, words: Words, repeats: int) -> tuple[float, int]:
        """Seconds to read all `words`, `repeats` times, and their sum modulo 2^64."""
        assert words.size % 32 == 0
        total = ctypes.c_uint64()
        size, count = ctypes.c_size_t(words.size), ctypes.c_uint64(repeats)
        return float(self.library.read_all(_at(words), size, count, ctypes.byref(total))), total.value

    def read_backwards(self, words: Words) -> tuple[float, int]:
        """As `read_all`, once, from the last word to the first."""
        assert words.size % 32 == 0
        total = ctypes.c_uint64()
        return float(
            self.library.read_backwards(_at(words), ctypes.c_size_t(words.size), ctypes.byref(total))
        ), total.value

    def read_bursts(self, words: Words, places: Words, burst_words: int) -> tuple[float, int]:
        """Seconds to read the `burst_words` words from each of `places` on, and the sum of all that was read."""
        assert burst_words % 8 == 0
        total = ctypes.c_uint64()
        count, size = ctypes.c_size_t(places.size), ctypes.c_size_t(burst_words)
        seconds = self.library.read_bursts(_at(words), _at(places), count, size, ctypes.byref(total))
        return float(seconds), total.value

    def horner(self, x: Floats, y: Floats, repeats: int) -> float:
        """Seconds of `repeats` polynomials of degree 16 of each element: 32 FLOP each."""
        size, count = ctypes.c_size_t(x.size), ctypes.c_uint64(repeats)
        return float(self.library.horner(_at(x), _at(y), size, count))

    def fma_chain(self, count: int) -> tuple[float, float]:
        """Seconds of `count` dependent fused multiply-adds x = x / 2 + 1 from 0, and the x they end at (2)."""
        value = ctypes.c_double(0.0)
        half, one = ctypes.c_double(0.5), ctypes.c_double(1.0)
        return float(self.library.fma_chain(ctypes.byref(value), half, one, ctypes.c_uint64(count))), value.value

    def branches(self, choices: NDArray[np.uint8]) -> tuple[float, int]:
        """Seconds to branch by each of `choices`, and how many were taken."""
        taken = ctypes.c_uint64()
        seconds = self.library.branches(_at(choices), ctypes.c_size_t(choices.size), ctypes.byref(taken))
        return float(seconds), taken.value

    def mutexes(self, count: int) -> float:
        """Seconds to lock and unlock an uncontended mutex `count` times."""
        return float(self.library.mutexes(ctypes.c_uint64(count)))

    def keep_in_flight(self, context: int, depth: int, requests: Words, events: NDArray[Any]) -> None:
        """Run the requests (addresses of struct iocb), up to `depth` at a time; one of `events` (struct io_event) each.

        Raises OSError where a system call fails; requests may be in flight until their context is destroyed.
        """
        assert len(events) == len(requests)
        of_all, at_once, each = ctypes.c_int64(len(requests)), ctypes.c_int64(depth), ctypes.c_int64(events.itemsize)
        code = self.library.keep_in_flight(ctypes.c_uint64(context), at_once, of_all, _at(requests), _at(events), each)
        if code:
            raise OSError(code, os.strerror(code))


def load(flags: Sequence[str] = FASTEST, scratch: Path | None = None) -> Kernels | Missing:
    """The kernels compiled with `flags`. `scratch`: where they go if the user's cache cannot be written to."""
    compiler = next(filter(None, map(shutil.which, [*_named_compiler(), *COMPILERS])), None)
    if compiler is None:
        return Missing(f"no C compiler: none of {', '.join(COMPILERS)} is on PATH (Debian: apt install gcc libc6-dev)")
    try:
        version = _version(compiler)
        path = _compiled(compiler, version, tuple(flags), scratch)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return Missing(f"{compiler} could not compile the kernels: {' '.join(str(told).split())[:500]}")
    for name in ("chase", "read_all", "read_backwards", "read_bursts", "horner", "fma_chain", "branches", "mutexes"):
        getattr(library, name).restype = ctypes.c_double
    library.walk.restype = ctypes.c_uint64
    library.keep_in_flight.restype = ctypes.c_int64
    for name in ("fill", "stream"):
        getattr(library, name).restype = None
    return Kernels(library, f"C, {version}, {' '.join(flags)}")


def _named_compiler() -> list[str]:
    return os.environ.get("CC", "").split()[:1]


@cache
def _version(compiler: str) -> str:
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=COMPILE_WITHIN_S)
    return told.stdout.splitlines()[0].strip() if told.stdout else Path(compiler).name


def _compiled(compiler: str, version: str, flags: tuple[str, ...], scratch: Path | None) -> Path:
    key = "\0".join([SOURCE.read_text(), *flags, compiler, version, platform.machine(), _cpu()])
    name = f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    folder = _folder(scratch)
    path = folder / name
    if path.exists():
        return path
    handle, fresh = tempfile.mkstemp(suffix=".so", dir=folder)  # two jobs may compile at once: the file appears whole
    os.close(handle)
    try:
        command = [compiler, *flags, "-std=gnu11", "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", fresh, "-lm"]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_WITHIN_S)
        Path(fresh).replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(fresh).unlink()
    return path


def _folder(scratch: Path | None) -> Path:
    """The cache folder, made; for this user alone, since what lies there is run."""
    with contextlib.suppress(OSError, RuntimeError):
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = Path(base) / "torchstone" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    folder = (scratch or Path(tempfile.gettempdir())) / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
