"""The `hardware` reports of a host, read for its ceilings."""

from __future__ import annotations

from typing import Any

import orjson
from sqlalchemy import Connection, and_, select

from torchstone.ceilings import Report, document
from torchstone.jobs import State, rfc3339
from torchstone.store.schema import jobs, placements, results

MOST_REPORTS = 20
"""Of these the newest that fit are used; what older ones found is no longer this machine."""


def ceilings(conn: Connection, host: str) -> dict[str, Any] | None:
    """The ceilings of `host`; None where none of its last reports is fit for it."""
    here = and_(placements.c.job_id == jobs.c.id, placements.c.attempt == jobs.c.attempt, placements.c.host == host)
    query = (
        select(jobs.c.id, jobs.c.finished_us, results.c.result)
        .join(placements, here)
        .join(results, results.c.job_id == jobs.c.id)
        .where(jobs.c.kind == "hardware", jobs.c.state == State.succeeded.value)
        .order_by(jobs.c.id.desc())
        .limit(MOST_REPORTS)
    )
    return document(host, (_report(row) for row in conn.execute(query)))


def _report(row: Any) -> Report:
    return Report(row.id, None if row.finished_us is None else rfc3339(row.finished_us), orjson.loads(row.result))
