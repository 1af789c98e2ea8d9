"""What a job printed, in numbered chunks per attempt, readable while it runs.

Each attempt writes under its own number, so that a stale worker's last words stand apart from the current attempt's.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, select

from torchstone.store.engine import insert_into, storable
from torchstone.store.schema import logs


def append(conn: Connection, job_id: str, attempt: int, chunks: Sequence[tuple[int, str]]) -> None:
    """Store (seq, text) chunks; those stored before, by a call whose answer got lost, stay as they are."""
    rows = [{"job_id": job_id, "attempt": attempt, "seq": seq, "text": storable(text)} for seq, text in chunks]
    if rows:
        conn.execute(insert_into(conn, logs).on_conflict_do_nothing(), rows)


def read(
    conn: Connection, job_id: str, attempt: int | None = None, after: int = -1, limit: int = 64
) -> list[tuple[int, int, str]]:
    """Up to `limit` chunks (attempt, seq, text) in order; of one attempt, those after seq `after`, or of all."""
    query = select(logs.c.attempt, logs.c.seq, logs.c.text).where(logs.c.job_id == job_id)
    if attempt is not None:
        query = query.where(logs.c.attempt == attempt, logs.c.seq > after)
    query = query.order_by(logs.c.attempt, logs.c.seq).limit(limit)
    return [(row.attempt, row.seq, row.text) for row in conn.execute(query)]
