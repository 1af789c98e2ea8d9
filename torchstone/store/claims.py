"""How a worker gets a job: the one that is due, with all its devices, and nobody else gets it.

with store.write() as conn:
    claim = claims.claim(conn, host, lease_s=30)          # one job, or None
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Connection, Row, and_, insert, not_, or_, select, update

from torchstone.jobs import State
from torchstone.scheduling import Choice, HostView, Waiting, choose, is_exclusive, resolve_type
from torchstone.store import events
from torchstone.store.hosts import Host, lock_machine
from torchstone.store.hosts import with_cuda as hosts_with_cuda
from torchstone.store.leases import Holder
from torchstone.store.schema import (
    attempts,
    hosts,
    is_held,
    is_queued,
    jobs,
    now_us,
    placements,
)


@dataclass(frozen=True)
class Claim:
    """A job that this host now runs."""

    holder: Holder
    spec: str
    devices: tuple[str, ...]
    exclusive: bool
    timeout_s: float


def claim(conn: Connection, host: Host, lease_s: float) -> Claim | None:
    """Take the next job that `host` should run, with all its devices; None when there is none for now.

    None also for a host that is not registered as up, or that was registered anew by a later run.
    """
    lock_machine(conn, host.machine)
    mine = and_(hosts.c.name == host.name, hosts.c.incarnation == host.incarnation, hosts.c.state == "up")
    if conn.scalar(select(hosts.c.name).where(mine)) is None:
        return None
    while True:
        view = _view(conn, host, lease_s)
        choice = choose(view, _waiting(conn, view), _alone_next(conn, host, view, lease_s))
        if choice is None:
            return None
        savepoint = conn.begin_nested()
        row = conn.execute(
            update(jobs)
            .where(jobs.c.id == choice.job_id, jobs.c.state == State.queued.value)
            .values(state=State.running.value, attempt=jobs.c.attempt + 1, started_us=now_us(), progress=None)
            .returning(jobs.c.attempt, jobs.c.spec, jobs.c.timeout_s)
        ).first()
        if row is not None:
            savepoint.commit()
            return _place(conn, host, choice, row, lease_s)
        # Another machine took it, or somebody cancelled it, between the two statements: look again, and let go of the
        # row, which PostgreSQL locked before it saw that the state was another one.
        savepoint.rollback()


def _place(conn: Connection, host: Host, choice: Choice, row: Row[Any], lease_s: float) -> Claim:
    holder = Holder(choice.job_id, row.attempt, host.name, host.incarnation)
    conn.execute(
        insert(placements).values(
            job_id=holder.job_id,
            attempt=holder.attempt,
            host=host.name,
            machine=host.machine,
            incarnation=host.incarnation,
            devices=orjson.dumps(choice.devices).decode(),
            exclusive=choice.exclusive,
            lease_until_us=now_us() + int(lease_s * 1e6),
        )
    )
    conn.execute(insert(attempts).values(job_id=holder.job_id, number=holder.attempt, started_us=now_us()))
    started = {"state": "running", "attempt": holder.attempt, "host": host.name, "devices": list(choice.devices)}
    events.add(conn, holder.job_id, "state", started)
    return Claim(holder, row.spec, choice.devices, choice.exclusive, row.timeout_s)


def _view(conn: Connection, host: Host, lease_s: float) -> HostView:
    leased: set[str] = set()
    taken_whole = False
    held = select(placements.c.devices, placements.c.exclusive).where(placements.c.machine == host.machine, is_held)
    for row in conn.execute(held):
        leased.update(orjson.loads(row.devices))
        taken_whole = taken_whole or row.exclusive
    by_type: dict[str, list[str]] = {}
    for device in host.devices:
        by_type.setdefault(device["type"], []).append(device["name"])
    return HostView(
        devices={kind: tuple(names) for kind, names in by_type.items()},
        leased=frozenset(leased),
        taken_whole=taken_whole,
        memory_bytes=host.memory_bytes,
        cuda_hosts=hosts_with_cuda(conn, lease_s),
    )


def _waiting(conn: Connection, host: HostView) -> list[Waiting]:
    """The first job in order that this host could ever run: the one that `choose` starts or waits for."""
    cuda, cpu = (len(host.devices.get(kind, ())) for kind in ("cuda", "cpu"))
    count = jobs.c.device_count
    fits = [and_(count <= devices, jobs.c.memory_bytes <= room) for devices, room in set(host.cuda_anywhere)]
    cuda_could_run = or_(*fits)
    could_run = or_(
        and_(jobs.c.device_type == "cuda", count <= cuda),
        and_(jobs.c.device_type == "cpu", count <= cpu),
        and_(jobs.c.device_type == "auto", cuda_could_run, count <= cuda),
        and_(jobs.c.device_type == "auto", not_(cuda_could_run), count <= cpu),
    )
    in_time = or_(jobs.c.start_by_us.is_(None), jobs.c.start_by_us > now_us(), jobs.c.attempt > 0)
    query = (
        select(jobs.c.id, jobs.c.device_type, count, jobs.c.isolation, jobs.c.memory_bytes, jobs.c.rank_us)
        .where(is_queued, could_run, jobs.c.memory_bytes <= host.memory_bytes, in_time)
        .order_by(jobs.c.rank_us, jobs.c.id)
        .limit(1)
    )
    return [Waiting(*row) for row in conn.execute(query)]


def _alone_next(conn: Connection, host: Host, view: HostView, lease_s: float) -> Waiting | None:
    """The first of the jobs that the machine's other living workers are next to run alone on it; see `choose`."""
    beside = and_(hosts.c.machine == host.machine, hosts.c.name != host.name, hosts.c.state == "up")
    fresh = hosts.c.seen_us > now_us() - int(lease_s * 1e6)
    query = select(hosts.c.cuda_count, hosts.c.cpu_count, hosts.c.memory_bytes).where(beside, fresh)
    alone = []
    for cuda, cpu, memory_bytes in conn.execute(query).fetchall():
        devices = {"cuda": tuple(map(str, range(cuda))), "cpu": tuple(map(str, range(cpu)))}
        for job in _waiting(conn, HostView(devices, frozenset(), False, memory_bytes, view.cuda_hosts)):
            if is_exclusive(job.isolation, resolve_type(job, (*view.cuda_hosts, (cuda, memory_bytes)))):
                alone.append(job)
    return min(alone, key=lambda job: job.place, default=None)
