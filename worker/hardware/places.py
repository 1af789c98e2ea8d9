"""Where a probe runs and on what: groups of cores, the caches that sysfs tells of, pages, a thread a core.

scopes(bench)                  # [Scope("core", (0,)), Scope("host", (0, 1))]: each group of cores once
caches(0)                      # [Cache(level=1, bytes=32768, kind="Data", cores=(0,)), ...]
on_cores((0, 1), work)         # work(0) pinned to core 0, work(1) to core 1, at the same time
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from worker.devices import parse_cpulist
from worker.hardware.probe import ProbeBench

LINE_BYTES = 64
HUGE_PAGE_BYTES = 2 << 20
T = TypeVar("T")
_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Scope:
    """A group of cores that work at once."""

    name: str
    """core, device or host: the widest that this group is."""
    cores: tuple[int, ...]
    devices: int

    @property
    def at(self) -> dict[str, Any]:
        return {"cores": len(self.cores), "devices": self.devices}


def scopes(bench: ProbeBench) -> list[Scope]:
    """One core, all cores of the first device, all devices at once; a group that is another one too, once."""
    first = tuple(core for core in bench.devices[0].cores if core in bench.cores) or bench.cores
    wanted = [
        Scope("core", first[:1], 1),
        Scope("device", first, 1),
        Scope("host", bench.cores, len(bench.devices)),
    ]
    return list({scope.cores: scope for scope in wanted}.values())


@dataclass(frozen=True)
class Cache:
    """A cache as sysfs describes it."""

    level: int
    bytes: int
    kind: str
    cores: tuple[int, ...]
    """Who shares it."""


def caches(core: int, cpus: Path = _CPUS) -> list[Cache]:
    """The data and unified caches of a core, nearest first; none where the system does not tell."""
    found = []
    for folder in sorted((cpus / f"cpu{core}/cache").glob("index*")):
        kind, size = _read(folder / "type"), _read(folder / "size")
        if kind in ("Data", "Unified") and size[-1:] in _UNITS and size[:-1].isdigit():
            sharing = tuple(parse_cpulist(_read(folder / "shared_cpu_list")))
            found.append(Cache(int(_read(folder / "level")), int(size[:-1]) * _UNITS[size[-1]], kind, sharing))
    return sorted(found, key=lambda cache: cache.level)


def last_level_bytes(cores: tuple[int, ...]) -> int:
    """All last-level caches that these cores can use, together; 32 MiB where the system does not tell."""
    last = {cache.cores: cache.bytes for core in cores for cache in caches(core)[-1:]}
    return sum(last.values()) or 32 << 20


def nodes(cores: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """NUMA nodes with those of `cores` that belong to them."""
    found = {}
    for node in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        ours = tuple(core for core in parse_cpulist(_read(node / "cpulist")) if core in cores)
        if ours:
            found[int(node.name[4:])] = ours
    return found


def memory(count: int, dtype: Any = np.float64, huge_pages: bool = False) -> NDArray[Any]:
    """`count` numbers on pages of their own, zero and untouched: whoever writes first decides where they lie.

    `huge_pages` asks for them; else it is as the system has it for everybody.
    """
    size = max(1, count * np.dtype(dtype).itemsize)
    if huge_pages:  # a whole one is needed for the kernel to give one
        size = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages:
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=dtype, count=count)


def random_cycle(size_bytes: int, seed: int, huge_pages: bool = False) -> NDArray[np.uint64]:
    """Words in which following `i = words[i]` from 0 visits every cache line once, in random order, and returns.

    One word a line is used. Every order is a single cycle, so that no prefetcher knows the next line and no part is
    left out.
    """
    lines, words_per_line = size_bytes // LINE_BYTES, LINE_BYTES // 8
    words: NDArray[np.uint64] = memory(lines * words_per_line, np.uint64, huge_pages)
    others = np.random.default_rng(seed).permutation(lines - 1) + 1
    order = np.concatenate([[0], others]).astype(np.uint64) * np.uint64(words_per_line)
    words[order] = np.roll(order, -1)
    return words


@contextmanager
def pinned(cores: tuple[int, ...]) -> Iterator[None]:
    """This thread on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def on_cores(cores: tuple[int, ...], work: Callable[[int], T]) -> list[T]:
    """`work(rank)` for every core at once, each in a thread pinned to its core; what they return, in order."""
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int, core: int) -> None:
        try:
            os.sched_setaffinity(0, {core})
            found[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(len(cores))]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
