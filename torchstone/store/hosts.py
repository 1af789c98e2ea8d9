"""The worker hosts: who registered with which devices, and who is still heard of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Connection, func, select, update

from torchstone.jobs import rfc3339
from torchstone.scheduling import CudaHost
from torchstone.store.engine import insert_into
from torchstone.store.schema import hosts, is_held, jobs, now_us, placements


@dataclass(frozen=True)
class Host:
    """A worker host as it registers: one run (`incarnation`) of one worker process on one machine."""

    name: str
    machine: str
    incarnation: str
    pid: int
    pid_started: float
    devices: list[dict[str, Any]]
    memory_bytes: int
    info: dict[str, Any]

    def count(self, device_type: str) -> int:
        """How many devices of a type it owns."""
        return sum(device["type"] == device_type for device in self.devices)


def register(conn: Connection, host: Host) -> None:
    """Make `host` known as up, in place of any earlier run under the same name."""
    values = {
        "machine": host.machine,
        "incarnation": host.incarnation,
        "pid": host.pid,
        "pid_started": host.pid_started,
        "devices": orjson.dumps(host.devices).decode(),
        "memory_bytes": host.memory_bytes,
        "cuda_count": host.count("cuda"),
        "cpu_count": host.count("cpu"),
        "info": orjson.dumps(host.info).decode(),
        "state": "up",
        "registered_us": now_us(),
        "seen_us": now_us(),
    }
    row = insert_into(conn, hosts).values(name=host.name, **values)
    conn.execute(row.on_conflict_do_update(index_elements=[hosts.c.name], set_=values))


def find(conn: Connection, name: str) -> dict[str, Any] | None:
    """The row of a host by its name, with `silent_s`, the seconds since it was last heard of."""
    silent_s = ((now_us() - hosts.c.seen_us) / 1e6).label("silent_s")
    row = conn.execute(select(hosts, silent_s).where(hosts.c.name == name)).mappings().first()
    return dict(row) if row else None


def lock_machine(conn: Connection, machine: str) -> None:
    """Until the end of the transaction nobody else claims, or registers, on this machine."""
    if conn.dialect.name == "postgresql":  # SQLite's write transactions are one at a time anyway
        conn.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(machine, 0))))


def beside(conn: Connection, machine: str, name: str, lease_s: float) -> list[dict[str, Any]]:
    """The other living hosts of a machine: name, devices (JSON), seen_us, pid and pid_started."""
    fresh = hosts.c.seen_us > now_us() - int(lease_s * 1e6)
    mine = (hosts.c.machine == machine, hosts.c.name != name, hosts.c.state != "down", fresh)
    columns = (hosts.c.name, hosts.c.devices, hosts.c.seen_us, hosts.c.pid, hosts.c.pid_started)
    return [dict(row) for row in conn.execute(select(*columns).where(*mine)).mappings()]


def set_state(conn: Connection, name: str, incarnation: str, state: str) -> None:
    """Say that this run of the host is `up`, `draining` or `down`."""
    conn.execute(
        update(hosts)
        .where(hosts.c.name == name, hosts.c.incarnation == incarnation)
        .values(state=state, seen_us=now_us())
    )


def living(conn: Connection, lease_s: float) -> list[dict[str, Any]]:
    """Hosts that are up and were heard of within a lease: name, machine, cuda_count, cpu_count, memory_bytes."""
    fresh = hosts.c.seen_us > now_us() - int(lease_s * 1e6)
    columns = (hosts.c.name, hosts.c.machine, hosts.c.cuda_count, hosts.c.cpu_count, hosts.c.memory_bytes)
    return [dict(row) for row in conn.execute(select(*columns).where(hosts.c.state == "up", fresh)).mappings()]


def with_cuda(conn: Connection, lease_s: float) -> tuple[CudaHost, ...]:
    """The living hosts that have CUDA devices, equal ones once: they decide what `auto` means."""
    fresh = hosts.c.seen_us > now_us() - int(lease_s * 1e6)
    query = select(hosts.c.cuda_count, hosts.c.memory_bytes).distinct()
    rows = conn.execute(query.where(hosts.c.cuda_count > 0, hosts.c.state == "up", fresh))
    return tuple((row.cuda_count, row.memory_bytes) for row in rows)


def leased(conn: Connection) -> list[dict[str, Any]]:
    """Every lease that is held, and what is known of its end: what a waiting job waits for.

    machine, job_id, exclusive, left_s (what the job itself expects, or None) and by_us (when its
    time limit ends it).
    """
    query = (
        select(
            placements.c.machine,
            placements.c.job_id,
            placements.c.exclusive,
            jobs.c.progress,
            jobs.c.started_us,
            jobs.c.timeout_s,
        )
        .join(jobs, jobs.c.id == placements.c.job_id)
        .where(is_held)
    )
    found = []
    for row in conn.execute(query).mappings():
        progress = orjson.loads(row["progress"]) if row["progress"] else {}
        left_s = progress.get("eta_s")
        found.append(
            {
                "machine": row["machine"],
                "job_id": row["job_id"],
                "exclusive": row["exclusive"],
                "left_s": left_s if isinstance(left_s, int | float) else None,
                "by_us": int(row["started_us"] + row["timeout_s"] * 1e6),
            }
        )
    return found


def inventory(conn: Connection, lease_s: float) -> list[dict[str, Any]]:
    """Every host with its devices and, per device, the job that holds it: the body of GET /v1/devices."""
    silent_s = ((now_us() - hosts.c.seen_us) / 1e6).label("silent_s")
    held: dict[tuple[str, str], dict[str, Any]] = {}
    exclusive: dict[str, str] = {}
    query = select(
        placements.c.machine,
        placements.c.devices,
        placements.c.exclusive,
        placements.c.job_id,
        placements.c.attempt,
        placements.c.lease_until_us,
    ).where(is_held)
    for placed in conn.execute(query):
        holder = {"job": placed.job_id, "attempt": placed.attempt, "lease_until": rfc3339(placed.lease_until_us)}
        for device in orjson.loads(placed.devices):
            held[placed.machine, device] = holder
        if placed.exclusive:
            exclusive[placed.machine] = placed.job_id
    items = []
    for row in conn.execute(select(hosts, silent_s).order_by(hosts.c.name)).mappings():
        state = row["state"] if row["state"] == "down" or row["silent_s"] < lease_s else "lost"
        items.append(
            {
                "name": row["name"],
                "machine": row["machine"],
                "state": state,
                "registered_at": rfc3339(row["registered_us"]),
                "seen_at": rfc3339(row["seen_us"]),
                "memory_bytes": row["memory_bytes"],
                "isolated_by": exclusive.get(row["machine"]),
                "devices": [
                    {**device, "held_by": held.get((row["machine"], device["name"]))}
                    for device in orjson.loads(row["devices"])
                ],
                "info": orjson.loads(row["info"]),
            }
        )
    return items
