"""Which waiting job starts next on a host, and on which of its devices: a pure function of a snapshot.

    choose(host, waiting) -> Choice(job_id, devices, exclusive) | None

The rule is one strict order (`rank_us`): first come, first served, and each step of priority counts as an hour
of having come earlier. So a `low` job is overtaken by `normal` ones that come within an hour of it and by `high` ones
within two, never by later ones: nothing starves.

The first job in that order that this host could ever run is the one; while its devices are not free, nothing behind it
overtakes, so a gang starts, at the latest, when those have ended that ran on the host when it came to the head. The
price: devices that are free meanwhile stand still. Jobs that this host cannot run (other devices, more of them, more
memory) are no concern of it, but for one case: a job that must have the machine to itself and is first for another
worker of that machine.

`choose` decides, the store's compare-and-set on the job's id makes it so (`torchstone.store.leases.claim`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PRIORITIES = {"low": 0, "normal": 1, "high": 2}
PRIORITY_STEP_US = 3600 * 1_000_000
"""How much earlier a job of the next higher priority counts as having come."""


def rank_us(created_us: int, priority: int) -> int:
    """A job's place in the order of starting: the smallest is first, and of equal ones the smaller id."""
    return created_us - priority * PRIORITY_STEP_US


@dataclass(frozen=True)
class Waiting:
    """A queued job, as the scheduler sees it."""

    job_id: str
    device_type: str  # auto | cuda | cpu
    device_count: int
    isolation: str  # auto | device | host
    memory_bytes: int = 0
    rank_us: int = 0

    @property
    def place(self) -> tuple[int, str]:
        """What jobs are ordered by."""
        return self.rank_us, self.job_id


CudaHost = tuple[int, int]
"""How many CUDA devices a host has, and the bytes of memory that a job may take there."""


@dataclass(frozen=True)
class HostView:
    """A host at one moment: its devices by type, which are leased, and whether its machine is shared or taken whole."""

    devices: dict[str, tuple[str, ...]]  # type -> names
    leased: frozenset[str]  # on the whole machine, other workers' too
    taken_whole: bool  # an exclusive job runs on the machine
    memory_bytes: int
    cuda_hosts: tuple[CudaHost, ...] = ()  # of all living hosts: an `auto` job waits for one that could run it

    @property
    def cuda_anywhere(self) -> tuple[CudaHost, ...]:
        """Those and this one."""
        return (*self.cuda_hosts, (len(self.devices.get("cuda", ())), self.memory_bytes))


@dataclass(frozen=True)
class Choice:
    """Start this job, on these devices."""

    job_id: str
    devices: tuple[str, ...]
    exclusive: bool


def resolve_type(waiting: Waiting, cuda_hosts: Iterable[CudaHost]) -> str:
    """The device type that `waiting` means: `auto` is cuda where any of these hosts could run it there, else cpu."""
    if waiting.device_type != "auto":
        return waiting.device_type
    could_run = any(waiting.device_count <= count and waiting.memory_bytes <= room for count, room in cuda_hosts)
    return "cuda" if could_run else "cpu"


def is_exclusive(isolation: str, device_type: str) -> bool:
    """Whether nobody else may run on the machine: asked for, or timing on CPU devices, which share caches."""
    return isolation == "host" or (isolation == "auto" and device_type == "cpu")


def choose(host: HostView, waiting: Iterable[Waiting], alone_next: Waiting | None = None) -> Choice | None:
    """The job to start on `host` now, from `waiting` in the order in which they should run; None: not yet.

    `alone_next`: the first job of those that other workers of the same machine will start on it and that must have it
    to themselves. Whatever comes after it waits, or the machine might never be empty.
    """
    if host.taken_whole:
        return None
    for job in waiting:
        if alone_next is not None and alone_next.place < job.place:
            return None
        device_type = resolve_type(job, host.cuda_anywhere)
        names = host.devices.get(device_type, ())
        if job.device_count > len(names) or job.memory_bytes > host.memory_bytes:
            continue
        free = [name for name in names if name not in host.leased]
        exclusive = is_exclusive(job.isolation, device_type)
        if len(free) < job.device_count or (exclusive and host.leased):
            return None
        return Choice(job.job_id, tuple(free[: job.device_count]), exclusive)
    return None
