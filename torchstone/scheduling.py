"""Which waiting job starts next on a host, and on which of its devices: a pure function of a snapshot.

    choose(host, waiting) -> Choice(job_id, devices, exclusive) | None

The rule is strict order: high before low priority, then first come, first served. The first job in that order that
this host could ever run is the one; while its devices are not free, nothing behind it overtakes, so a gang is never
starved by a stream of smaller jobs. Jobs that this host cannot run (other devices, more of them, more memory) are no
concern of it.

`choose` decides, the store's compare-and-set on the job's id makes it so (`torchstone.store.leases.claim`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PRIORITIES = {"low": 0, "normal": 1, "high": 2}


@dataclass(frozen=True)
class Waiting:
    """A queued job, as the scheduler sees it."""

    job_id: str
    device_type: str  # auto | cuda | cpu
    device_count: int
    isolation: str  # auto | device | host
    memory_bytes: int = 0


@dataclass(frozen=True)
class HostView:
    """A host at one moment: its devices by type, which are leased, and whether its machine is shared or taken whole."""

    devices: dict[str, tuple[str, ...]]  # type -> names
    leased: frozenset[str]  # on the whole machine, other workers' too
    taken_whole: bool  # an exclusive job runs on the machine
    memory_bytes: int
    cuda_elsewhere: int = 0  # the most CUDA devices of any living host: an `auto` job waits for those


@dataclass(frozen=True)
class Choice:
    """Start this job, on these devices."""

    job_id: str
    devices: tuple[str, ...]
    exclusive: bool


def resolve_type(waiting: Waiting, host_cuda: int, most_cuda: int) -> str:
    """The device type that `waiting` means here: `auto` is cuda wherever any host has enough of them, else cpu."""
    if waiting.device_type != "auto":
        return waiting.device_type
    return "cuda" if max(host_cuda, most_cuda) >= waiting.device_count else "cpu"


def is_exclusive(isolation: str, device_type: str) -> bool:
    """Whether nobody else may run on the machine: asked for, or timing on CPU devices, which share caches."""
    return isolation == "host" or (isolation == "auto" and device_type == "cpu")


def choose(host: HostView, waiting: Iterable[Waiting]) -> Choice | None:
    """The job to start on `host` now, from `waiting` in the order in which they should run; None: not yet."""
    if host.taken_whole:
        return None
    for job in waiting:
        device_type = resolve_type(job, len(host.devices.get("cuda", ())), host.cuda_elsewhere)
        names = host.devices.get(device_type, ())
        if job.device_count > len(names) or job.memory_bytes > host.memory_bytes:
            continue
        free = [name for name in names if name not in host.leased]
        exclusive = is_exclusive(job.isolation, device_type)
        if len(free) < job.device_count or (exclusive and host.leased):
            return None
        return Choice(job.job_id, tuple(free[: job.device_count]), exclusive)
    return None
