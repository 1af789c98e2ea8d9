"""Small specs, hosts and jobs for tests of the store.

[job_id] = submit(store)
host = up(store, "a", cpu=2)
claimed = claim(store, host)
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select, update

from torchstone.specs import BaseSpec, parse_spec
from torchstone.store import Store, claims, hosts, jobs, leases
from torchstone.store.schema import now_us, placements

LEASE_S = 30.0


def spec(*, count: int = 1, device_type: str = "cpu", isolation: str = "device", **fields: Any) -> BaseSpec:
    """A checked spec whose jobs share the machine, unless told otherwise."""
    devices = {"type": device_type, "count": count}
    return parse_spec({"kind": "jit", "model": {"preset": "mlp"}, "devices": devices, "isolation": isolation, **fields})


def submit(store: Store, number: int = 1, **fields: Any) -> list[str]:
    """Accept `number` equal jobs in one transaction; their ids."""
    new = [jobs.NewJob.of(spec(**fields)) for _ in range(number)]
    with store.write() as conn:
        return [stored.job_id for stored in jobs.insert_many(conn, new)]


def a_host(
    name: str = "a", *, cpu: int = 2, cuda: int = 0, machine: str = "", run: str = "1", memory_bytes: int = 1 << 34
) -> hosts.Host:
    """A host as it registers; without a machine's name it has one to itself."""
    devices = [{"name": f"{kind}:{i}", "type": kind} for kind, n in (("cuda", cuda), ("cpu", cpu)) for i in range(n)]
    return hosts.Host(name, machine or f"machine of {name}", run, 1, 0.0, devices, memory_bytes, {})


def up(store: Store, name: str = "a", **fields: Any) -> hosts.Host:
    """A registered host."""
    host = a_host(name, **fields)
    with store.write() as conn:
        hosts.register(conn, host)
    return host


def claim(store: Store, host: hosts.Host) -> claims.Claim:
    """The next job of `host`; there must be one."""
    with store.write() as conn:
        claimed = claims.claim(conn, host, LEASE_S)
    assert claimed is not None
    return claimed


def nothing_to_claim(store: Store, host: hosts.Host) -> bool:
    with store.write() as conn:
        return claims.claim(conn, host, LEASE_S) is None


def row(store: Store, job_id: str) -> dict[str, Any]:
    """The job as a client would get it."""
    with store.read() as conn:
        found = jobs.get(conn, job_id)
    assert found is not None
    return found


def state(store: Store, job_id: str) -> str:
    return str(row(store, job_id)["state"])


def let_leases_end(conn: Connection, host: str) -> None:
    """As if `host` had not been heard of for longer than a lease."""
    conn.execute(update(placements).where(placements.c.host == host).values(lease_until_us=now_us() - 1_000_000))


def silent_holder(store: Store) -> leases.Holder:
    """The holder of a job whose lease has just ended, unnoticed."""
    host = up(store)
    submit(store)
    holder = claim(store, host).holder
    with store.write() as conn:
        let_leases_end(conn, host.name)
    return holder


def lease_until_us(store: Store, holder: leases.Holder) -> int:
    query = select(placements.c.lease_until_us).where(
        placements.c.job_id == holder.job_id, placements.c.attempt == holder.attempt
    )
    with store.read() as conn:
        return int(conn.execute(query).scalar_one())


def reconcile(store: Store, *, max_attempts: int = 3, ring_again_s: float = 20) -> list[str]:
    """The jobs that a reconciliation took back."""
    with store.write() as conn:
        lost, _ = leases.reconcile(conn, max_attempts=max_attempts, ring_again_s=ring_again_s)
    return [holder.job_id for holder in lost]
