"""What the living hosts can run, and why a queued job waits.

    await fleet.check(spec)                    # InvalidRequest where no registered host could ever run it
    await fleet.waiting_for(row)
    # {"position": 1, "reason": "it is next, and waits for 2 cuda devices on one host; held by 01938c5e-... until about
    #  2026-11-30 01:14 UTC", "blocked_by": ["01938c5e-..."]}

Hosts come and go in seconds, leases in fractions of one: both are remembered for a moment, so that a thousand clients
that poll ask the database no oftener than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from time import monotonic
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection

from service.database import Database
from torchstone.facts import memory_estimate_bytes
from torchstone.fitness import cautions
from torchstone.models import LayersModel, PresetModel
from torchstone.scheduling import Waiting, is_exclusive, resolve_type
from torchstone.specs import AsyncSpec, BaseSpec, HardwareSpec, JitSpec, ParallelSpec, TrainSpec
from torchstone.store import hosts, jobs

_HOSTS_FOR_S = 1.0
_LEASES_FOR_S = 0.1
_MOST_NAMED = 16
_MOST_EXPLAINED = 3
_MOST_LEFT_S = 30 * 86400.0  # a job may claim anything

Json = dict[str, Any]
Value = TypeVar("Value")


def memory_bytes(spec: BaseSpec) -> int:
    """The least memory that `spec` takes, known before it runs; 0 where nothing is known."""
    if isinstance(spec, JitSpec):
        return _model_bytes(spec.model, max(spec.batch_sizes), spec.dtype, spec.grad)
    if isinstance(spec, AsyncSpec | ParallelSpec):
        return spec.memory_bytes
    if isinstance(spec, TrainSpec):
        return spec.data_bytes + _model_bytes(spec.fitted_model, spec.largest_share, spec.dtype, True)
    if isinstance(spec, HardwareSpec):
        return spec.LEAST_BYTES
    return 0


def _model_bytes(model: PresetModel | LayersModel, batch_size: int, dtype: str, grad: bool) -> int:
    if isinstance(model, PresetModel):  # adding up a preset's layers takes longer than the rest of a request
        return _preset_bytes(model, batch_size, dtype, grad)
    return memory_estimate_bytes(model, batch_size, dtype, grad)


_preset_bytes = lru_cache(1024)(memory_estimate_bytes)


@dataclass
class _Remembered(Generic[Value]):
    """A value that is asked for again once it is older than `for_s`."""

    ask: Callable[[Connection], Value]
    for_s: float
    value: Value
    until_s: float = 0.0

    async def get(self, database: Database) -> Value:
        if monotonic() >= self.until_s:
            self.value = await database.read(self.ask)
            self.until_s = monotonic() + self.for_s
        return self.value


class Fleet:
    """The hosts that are up, as the service knows them."""

    def __init__(self, database: Database, lease_s: float) -> None:
        self._database = database
        self._hosts: _Remembered[list[Json]] = _Remembered(lambda conn: hosts.living(conn, lease_s), _HOSTS_FOR_S, [])
        self._leases: _Remembered[list[Json]] = _Remembered(hosts.leased, _LEASES_FOR_S, [])

    async def check(self, spec: BaseSpec) -> int:
        """The least memory that `spec` takes. Raises InvalidRequest where no registered host could ever run it."""
        needed = memory_bytes(spec)
        jobs.check_capacity(spec, needed, await self._hosts.get(self._database))
        return needed

    async def would_run(self, spec: BaseSpec, needed_bytes: int) -> tuple[Json, list[str]]:
        """Where `spec` would run, and what its author should know."""
        wanted = Waiting("", spec.devices.type, spec.devices.count, spec.isolation, needed_bytes)
        living = await self._hosts.get(self._database)
        able = _able(wanted, living)
        device_type = _type_of(wanted, living) if living else None
        exclusive = device_type is not None and is_exclusive(spec.isolation, device_type)
        warnings = []
        if not living:
            warnings.append("no worker host is up: the job would wait for one")
        elif not able:
            warnings.append("no host that is up can run this: the job would wait for one")
        if device_type == "cpu" and spec.devices.type == "auto":
            warnings.append("it would run on CPU devices; such results are never ranked against those of GPUs")
        if device_type is not None:
            warnings += cautions(spec, device_type)
        where: Json = {
            "device_type": device_type,
            "device_count": spec.devices.count,
            "hosts": [host["name"] for host in able],
            "alone_on_its_machine": exclusive,
            "memory_bytes": needed_bytes,
        }
        return where, warnings

    async def waiting_for(self, row: Json) -> Json | None:
        """Why a job waits; None unless it is queued. `row` as from `jobs.get`, with how many jobs are `ahead`."""
        if row["state"] != "queued":
            return None
        ahead = row["ahead"]
        wanted = Waiting(
            row["id"], row["device_type"], row["device_count"], row["isolation"], row.get("memory_bytes", 0)
        )
        living = await self._hosts.get(self._database)
        able = _able(wanted, living)
        machines = {host["machine"] for host in able}
        leases = [lease for lease in await self._leases.get(self._database) if lease["machine"] in machines]
        holders = list(dict.fromkeys(lease["job_id"] for lease in leases))
        capped = ahead >= jobs.MOST_AHEAD
        return {
            "position": None if capped else ahead + 1,
            **({"position_at_least": ahead + 1} if capped else {}),
            "reason": _reason(wanted, ahead, living, able, leases, datetime.now(UTC)),
            "blocked_by": holders[:_MOST_NAMED],
        }


def _type_of(wanted: Waiting, living: Sequence[Json]) -> str:
    return resolve_type(wanted, ((host["cuda_count"], host["memory_bytes"]) for host in living))


def _able(wanted: Waiting, living: Sequence[Json]) -> list[Json]:
    """The hosts that could run it if all of their devices were free."""
    if not living:
        return []
    count = f"{_type_of(wanted, living)}_count"
    return [
        host for host in living if host[count] >= wanted.device_count and host["memory_bytes"] >= wanted.memory_bytes
    ]


def _reason(
    wanted: Waiting, ahead: int, living: Sequence[Json], able: Sequence[Json], leases: Sequence[Json], now: datetime
) -> str:
    if not living:
        return "no worker host is up"
    kind = "" if wanted.device_type == "auto" else f"{wanted.device_type} "
    devices = f"{wanted.device_count} {kind}device{'s' if wanted.device_count > 1 else ''}"
    if not able:
        return f"no host that is up can run this: it needs {devices} and {wanted.memory_bytes} bytes of memory"
    if ahead:
        many = f"at least {ahead} jobs are" if ahead >= jobs.MOST_AHEAD else f"{ahead} jobs are"
        return f"{'1 job is' if ahead == 1 else many} ahead in the queue"
    if not leases:
        return "it is next: a worker is about to take it"
    if is_exclusive(wanted.isolation, _type_of(wanted, living)):
        devices += " on a machine that it has to itself"
    elif wanted.device_count > 1:
        devices += " on one host"
    # The one that is done first is listed first: often it is the one that counts.
    held = sorted((_end(lease, now), lease["job_id"], lease) for lease in leases)
    shown = [_held(lease, until) for until, _, lease in held[:_MOST_EXPLAINED]]
    more = f" and {len(held) - len(shown)} more" if len(held) > len(shown) else ""
    return f"it is next, and waits for {devices}; held by {', '.join(shown)}{more}"


def _end(lease: Json, now: datetime) -> datetime:
    """When a lease ends: what the job itself expects, else when its time limit is over; to the minute, rounded up."""
    if lease["left_s"] is None:
        end = datetime.fromtimestamp(lease["by_us"] / 1e6, UTC)
    else:
        end = now + timedelta(seconds=min(max(0.0, lease["left_s"]), _MOST_LEFT_S))
    return end.replace(second=0, microsecond=0) + timedelta(minutes=1)


def _held(lease: Json, until: datetime) -> str:
    alone = ", which has the machine to itself," if lease["exclusive"] else ""
    about, latest = ("", " at the latest") if lease["left_s"] is None else ("about ", "")
    return f"{lease['job_id']}{alone} until {about}{until:%Y-%m-%d %H:%M} UTC{latest}"
