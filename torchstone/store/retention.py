"""What is removed, and when: jobs on request, by age or by size, and then the bytes that nobody names any more.

    with store.write() as conn:
        retention.pin(conn, holder, ["9f86d0..."])        # a worker, before it stores the bytes
        ...
        retention.delete_job(conn, job_id, "deleted on request")
    retention.collect(store, blobs, settings)              # every minute or so, by the service

Bytes are kept once, under their SHA-256, however many jobs name them. They are removed only while nobody can begin to
name them: a worker pins what it is about to store, waits while the same bytes are being removed, and looks only then
whether they are there already. A pin ends with its attempt, so what a lost attempt left is found.

No transaction is open while a bucket is asked to remove something: it may take its time. A removal is noted before and
forgotten after; one that was never forgotten (its process died) is made again.

A job that was deleted is remembered for a while, so that its address is 410 and not 404.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import structlog
from sqlalchemy import ColumnElement, Connection, and_, delete, exists, func, insert, select, text
from sqlalchemy.exc import SQLAlchemyError

from torchstone.errors import Conflict
from torchstone.jobs import is_terminal, rfc3339
from torchstone.settings import Settings
from torchstone.store import leases
from torchstone.store.artifacts import Blobs
from torchstone.store.engine import Store, insert_into
from torchstone.store.ids import first_id
from torchstone.store.leases import Holder
from torchstone.store.schema import (
    artifacts,
    checkpoints,
    deleted_jobs,
    idempotency_keys,
    is_finished,
    is_held,
    jobs,
    loose_blobs,
    now_us,
    placements,
    removals,
)

log = structlog.get_logger(__name__)

REMOVED_WITHIN_S = 120
"""Longer than a bucket is waited for: a removal that was noted before that is nobody's any more."""
REMEMBERED_DAYS = 90
"""For how long a deleted job is known to have existed."""
_IN_VAIN_S = 20.0  # what a round spends on removals that fail
_LET_GO = 0  # the attempt under which bytes are noted that their job names no more: none has that number
_DAY_US = 86_400 * 1_000_000
_JOBS_AT_ONCE = 1000


class Pin(StrEnum):
    """What became of a wish to store bytes."""

    held = "held"
    wait = "wait"
    """Some of them are just being removed: ask again a moment later, and store nothing before."""
    lost = "lost"
    """The attempt no longer holds its job."""


def pin(conn: Connection, holder: Holder, sha256s: Sequence[str]) -> Pin:
    """Say that this attempt is about to store these bytes and to name them.

    Until it ends nobody begins to remove them, also those that were there already, whatever the answer is.
    """
    if leases.still_held(conn, holder) is None:
        return Pin.lost
    _lock(conn, sha256s)
    leave(conn, holder, sha256s)
    if conn.scalar(select(exists().where(removals.c.sha256.in_(sha256s), _is_under_way(leases.clock_us(conn))))):
        return Pin.wait
    conn.execute(delete(removals).where(removals.c.sha256.in_(sha256s)))  # nobody's any more, or refused
    return Pin.held


def leave(conn: Connection, holder: Holder, sha256s: Iterable[str]) -> None:
    """Note that this attempt may leave these bytes behind: pinned while it holds its job, to be found once it does not.

    For itself where it stored them although its job was taken away.
    """
    rows = [{"sha256": each, "job_id": holder.job_id, "attempt": holder.attempt} for each in sorted(set(sha256s))]
    if rows:
        conn.execute(insert_into(conn, loose_blobs).on_conflict_do_nothing(), rows)


def let_go(conn: Connection, job_id: str, sha256s: Iterable[str]) -> None:
    """This job names these bytes no more, nor will it: they can go (`remove_loose`; the next `collect` does it)."""
    names = sorted(set(sha256s))
    _lock(conn, names)
    conn.execute(delete(loose_blobs).where(loose_blobs.c.job_id == job_id, loose_blobs.c.sha256.in_(names)))
    if names:
        rows = [{"sha256": sha256, "job_id": job_id, "attempt": _LET_GO} for sha256 in names]
        conn.execute(insert(loose_blobs), rows)


def delete_job(conn: Connection, job_id: str, reason: str) -> bool:
    """Remove a finished job and all that belongs to it; False if there is no such job.

    Raises Conflict where it has not ended yet. Its bytes stay until `collect` finds that no other job names them.
    """
    state = conn.scalar(select(jobs.c.state).where(jobs.c.id == job_id).with_for_update())
    if state is None:
        return False
    if not is_terminal(state):
        raise Conflict(f"the job is {state}: cancel it, and delete it once it has ended")
    names = {
        sha256
        for table in (artifacts, checkpoints)
        for sha256 in conn.scalars(select(table.c.sha256).where(table.c.job_id == job_id))
    }
    let_go(conn, job_id, names)
    conn.execute(insert(deleted_jobs).values(job_id=job_id, deleted_us=now_us(), reason=reason))
    conn.execute(delete(jobs).where(jobs.c.id == job_id))
    return True


def epitaph(conn: Connection, job_id: str) -> str | None:
    """When and why a job was deleted, in words; None if it never was, or too long ago."""
    row = conn.execute(select(deleted_jobs).where(deleted_jobs.c.job_id == job_id)).first()
    return None if row is None else f"{row.reason}, {rfc3339(row.deleted_us)}"


@dataclass(frozen=True)
class Collected:
    """What one `collect` removed."""

    job_ids: list[str]
    blobs: int


def collect(store: Store, blobs: Blobs, settings: Settings, is_over: Callable[[], bool] = lambda: False) -> Collected:
    """Delete the jobs that are too old or too large together, then every byte without a name; in small transactions.

    Between two of them it ends where `is_over`.
    """
    removed: list[str] = []
    with store.read() as conn:
        doomed = dict.fromkeys(_overdue(conn, settings.keep_days), f"kept for {settings.keep_days} days")
        for job_id in _too_large(conn, settings.keep_artifact_bytes):
            doomed.setdefault(job_id, f"artifacts are kept up to {settings.keep_artifact_bytes} bytes")
    for job_id, reason in doomed.items():
        if is_over():
            return Collected(removed, 0)
        with store.write() as conn:
            if delete_job(conn, job_id, reason):
                removed.append(job_id)
    with store.write() as conn:
        long_ago_us = now_us() - REMEMBERED_DAYS * _DAY_US
        conn.execute(delete(deleted_jobs).where(deleted_jobs.c.deleted_us < long_ago_us))
        oldest_us = leases.clock_us(conn) - int(settings.keep_keys_days * _DAY_US)
        conn.execute(delete(idempotency_keys).where(idempotency_keys.c.job_id < first_id(oldest_us)))
    with store.read() as conn:
        loose = list(conn.scalars(select(loose_blobs.c.sha256).where(~_is_pinned).distinct()))
        loose = list(dict.fromkeys([*loose, *conn.scalars(select(removals.c.sha256))]))
    gone, refused, in_vain_s = 0, [], 0.0
    for sha256 in loose:
        begun_s = time.monotonic()
        try:
            gone += remove_loose(store, sha256, blobs.delete)
        except SQLAlchemyError:
            raise
        except Exception as error:  # one that cannot be removed is in the way of no other
            refused.append(error)
            in_vain_s += time.monotonic() - begun_s
        if (
            is_over() or in_vain_s > _IN_VAIN_S
        ):  # a bucket that does not answer would be waited for as often as there are blobs
            break
    if refused:
        log.warning("some bytes could not be removed; trying again later", blobs=len(refused), error=str(refused[0]))
    return Collected(removed, gone)


def remove_loose(store: Store, sha256: str, remove: Callable[[str], None]) -> bool:
    """Remove these bytes by `remove` unless a job names them or an attempt has pinned them; whether it did.

    Whoever pins them meanwhile is told to wait. What `remove` raises is raised, and the removal stays noted: it may
    have been made all the same.
    """
    begun_s = time.monotonic()
    with store.write() as conn:
        since_us = _begin_removal(conn, sha256)
    # Whoever stood still since the note must not act on it: others may be at it, or done, and the bytes wanted again.
    if since_us is None or time.monotonic() - begun_s > REMOVED_WITHIN_S / 4:
        return False
    remove(sha256)
    with store.write() as conn:  # unless it took so long that somebody else is at it by now
        conn.execute(delete(removals).where(removals.c.sha256 == sha256, removals.c.since_us == since_us))
    return True


def _begin_removal(conn: Connection, sha256: str) -> int | None:
    """Note that these bytes are being removed, unless somebody wants them or is at it: when, and None."""
    _lock(conn, [sha256])
    clock_us = leases.clock_us(conn)
    if conn.scalar(select(exists().where(removals.c.sha256 == sha256, _is_under_way(clock_us)))):
        return None
    of_these = loose_blobs.c.sha256 == sha256
    # First the notes, then the questions: a note of a moment later, with an answer of before it, would be lost.
    conn.execute(delete(loose_blobs).where(of_these, ~_is_pinned))
    conn.execute(delete(removals).where(removals.c.sha256 == sha256))
    if conn.scalar(select(exists().where(of_these, _is_pinned))):
        return None
    if any(conn.scalar(select(exists().where(table.c.sha256 == sha256))) for table in (artifacts, checkpoints)):
        return None
    conn.execute(insert(removals).values(sha256=sha256, since_us=clock_us))
    return clock_us


def _is_under_way(clock_us: int) -> ColumnElement[bool]:
    """Of a removal: its process may still be at it. (One noted in the future: the clock was set back since.)"""
    return removals.c.since_us.between(clock_us - REMOVED_WITHIN_S * 1_000_000, clock_us + REMOVED_WITHIN_S * 1_000_000)


_is_pinned: ColumnElement[bool] = exists().where(
    and_(placements.c.job_id == loose_blobs.c.job_id, placements.c.attempt == loose_blobs.c.attempt, is_held)
)


def _lock(conn: Connection, sha256s: Sequence[str]) -> None:
    """Until the end of the transaction nobody else pins or removes these bytes (SQLite: nobody else writes at all)."""
    if conn.dialect.name == "postgresql" and sha256s:
        numbers = sorted({int.from_bytes(bytes.fromhex(each)[:8], signed=True) for each in sha256s})
        conn.execute(text("SELECT pg_advisory_xact_lock(n) FROM unnest(CAST(:n AS bigint[])) AS n"), {"n": numbers})


def _overdue(conn: Connection, keep_days: float | None) -> list[str]:
    if keep_days is None:
        return []
    until_us = now_us() - int(keep_days * _DAY_US)
    query = select(jobs.c.id).where(is_finished, jobs.c.finished_us <= until_us).order_by(jobs.c.finished_us)
    return list(conn.scalars(query.limit(_JOBS_AT_ONCE)))


def _too_large(conn: Connection, keep_bytes: int | None) -> list[str]:
    """The jobs that ended longest ago, as many as must go until the rest names no more than `keep_bytes`."""
    if keep_bytes is None:
        return []
    each = select(func.max(artifacts.c.bytes).label("bytes")).group_by(artifacts.c.sha256).subquery()
    over_bytes = int(conn.scalar(select(func.sum(each.c.bytes))) or 0) - keep_bytes
    if over_bytes <= 0:
        return []
    query = (
        select(artifacts.c.job_id, artifacts.c.sha256, artifacts.c.bytes)
        .join(jobs, jobs.c.id == artifacts.c.job_id)
        .order_by(jobs.c.finished_us, jobs.c.id)
    )
    rows = conn.execute(query).fetchall()
    names = Counter(row.sha256 for row in rows)
    doomed: dict[str, None] = {}
    for row in rows:
        if over_bytes <= 0 and row.job_id not in doomed:
            break
        doomed[row.job_id] = None
        names[row.sha256] -= 1
        over_bytes -= 0 if names[row.sha256] else row.bytes
    return list(doomed)
