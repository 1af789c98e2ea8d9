"""What a job printed, in numbered chunks per attempt, readable while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, insert, select

from torchstone.store.schema import logs


def append(conn: Connection, job_id: str, attempt: int, chunks: Sequence[tuple[int, str]]) -> None:
    """Store (seq, text) chunks; PostgreSQL's text cannot hold NUL, so it is shown as a replacement character."""
    rows = [
        {"job_id": job_id, "attempt": attempt, "seq": seq, "text": text.replace("\x00", "\ufffd")}
        for seq, text in chunks
    ]
    if rows:
        conn.execute(insert(logs), rows)


def read(
    conn: Connection, job_id: str, attempt: int | None = None, after: int = -1, limit: int = 64
) -> list[tuple[int, int, str]]:
    """Up to `limit` chunks (attempt, seq, text) in order; of one attempt, those after seq `after`, or of all."""
    query = select(logs.c.attempt, logs.c.seq, logs.c.text).where(logs.c.job_id == job_id)
    if attempt is not None:
        query = query.where(logs.c.attempt == attempt, logs.c.seq > after)
    query = query.order_by(logs.c.attempt, logs.c.seq).limit(limit)
    return [(row.attempt, row.seq, row.text) for row in conn.execute(query)]
