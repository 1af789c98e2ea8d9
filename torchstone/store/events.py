"""What happened to a job, in order: the source of SSE, with ids that a client can resume from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from sqlalchemy import Connection, bindparam, func, insert, select

from torchstone.jobs import rfc3339
from torchstone.store.schema import events, jobs, now_us


def add(conn: Connection, job_id: str, event_type: str, data: dict[str, Any]) -> None:
    """Record one event, by the database's clock.

    PostgreSQL gives out ids before the commits that show them. The job's row stays locked in between, so the events of
    one job become visible in the order of their ids, and a client that resumes after the last one it saw misses none.
    """
    if conn.dialect.name == "postgresql":
        conn.execute(select(jobs.c.id).where(jobs.c.id == job_id).with_for_update(key_share=True))
    conn.execute(
        insert(events).values(job_id=job_id, at_us=now_us(), type=event_type, data=orjson.dumps(data).decode())
    )


def add_many(conn: Connection, rows: Sequence[tuple[str, int, str, dict[str, Any]]]) -> None:
    """Record (job_id, at_us, type, data) rows, the first of their jobs, in one statement."""
    conn.execute(
        insert(events),
        [
            {"job_id": job_id, "at_us": at_us, "type": event_type, "data": orjson.dumps(data).decode()}
            for job_id, at_us, event_type, data in rows
        ],
    )


_AFTER = (
    select(events)
    .where(events.c.job_id == bindparam("job_id"), events.c.id > bindparam("last_id"))
    .order_by(events.c.id)
    .limit(bindparam("limit"))
)
_LATEST = select(jobs.c.id, select(func.max(events.c.id)).where(events.c.job_id == jobs.c.id).scalar_subquery()).where(
    jobs.c.id.in_(bindparam("job_ids", expanding=True))
)


def after(conn: Connection, job_id: str, last_id: int, limit: int = 500) -> list[dict[str, Any]]:
    """The events of a job with ids over `last_id`, in order: id, at, type, data (JSON text)."""
    rows = conn.execute(_AFTER, {"job_id": job_id, "last_id": last_id, "limit": limit})
    return [{"id": row.id, "at": rfc3339(row.at_us), "type": row.type, "data": row.data} for row in rows]


def latest(conn: Connection, job_ids: Sequence[str]) -> dict[str, int]:
    """The newest event's id of each of these jobs: one query for everybody who waits in a process."""
    return {row[0]: row[1] or 0 for row in conn.execute(_LATEST, {"job_ids": list(job_ids)})}
