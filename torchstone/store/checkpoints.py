"""What a running attempt has saved, so that the next one can go on from it should this one be lost.

    with store.write() as conn:
        retention.pin(conn, holder, [sha256])           # before the bytes are stored: should this worker die now
    with store.write() as conn:
        freed = checkpoints.replace(conn, holder, [("ddp", sha256, size)])     # None: the job was taken away

A checkpoint has parts, each a blob in the artifact store; saving some leaves the others as they are, all in one
transaction, which also lets go (`torchstone.store.retention`) what these had. Only the attempt that holds the job can
save. No two checkpoints have the same bytes: they name their job and attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select

from torchstone.jobs import TERMINAL
from torchstone.store import leases, retention
from torchstone.store.schema import checkpoints, jobs, now_us


@dataclass(frozen=True)
class Part:
    """One part of a job's checkpoint, and the attempt that saved it."""

    name: str
    attempt: int
    bytes: int
    sha256: str


def replace(conn: Connection, holder: leases.Holder, parts: Sequence[tuple[str, str, int]]) -> list[str] | None:
    """Save parts, each (name, sha256, bytes), in place of those of the same names; the SHA-256 that these had.

    None, and nothing is saved, once this attempt no longer holds the job: then the parts' own bytes are let go.
    """
    if not leases.holds(conn, holder):
        retention.let_go(conn, holder.job_id, [sha256 for _, sha256, _ in parts])
        return None
    ours = checkpoints.c.job_id == holder.job_id, checkpoints.c.name.in_([name for name, _, _ in parts])
    freed = list(conn.scalars(select(checkpoints.c.sha256).where(*ours)))
    conn.execute(delete(checkpoints).where(*ours))
    rows = [
        {"job_id": holder.job_id, "name": name, "attempt": holder.attempt, "bytes": size, "sha256": sha256}
        for name, sha256, size in parts
    ]
    conn.execute(insert(checkpoints).values(created_us=now_us()), rows)
    kept = {sha256 for _, sha256, _ in parts}
    freed = [sha256 for sha256 in freed if sha256 not in kept]
    retention.let_go(conn, holder.job_id, freed)
    return freed


def of(conn: Connection, job_id: str) -> list[Part]:
    """The parts that were saved for a job, by name."""
    columns = (checkpoints.c.name, checkpoints.c.attempt, checkpoints.c.bytes, checkpoints.c.sha256)
    query = select(*columns).where(checkpoints.c.job_id == job_id).order_by(checkpoints.c.name)
    return [Part(*row) for row in conn.execute(query)]


def not_needed(conn: Connection, limit: int = 100) -> list[tuple[str, str]]:
    """(job_id, sha256) of checkpoints whose jobs have ended: their blobs can go, and then they (`forget`)."""
    ended = jobs.c.state.in_(sorted(TERMINAL))
    query = select(checkpoints.c.job_id, checkpoints.c.sha256).join(jobs, jobs.c.id == checkpoints.c.job_id)
    return [(row.job_id, row.sha256) for row in conn.execute(query.where(ended).limit(limit))]


def forget(conn: Connection, job_id: str, sha256: str) -> None:
    """The blob of this part is gone."""
    conn.execute(delete(checkpoints).where(checkpoints.c.job_id == job_id, checkpoints.c.sha256 == sha256))
