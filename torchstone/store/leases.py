"""What workers do to the jobs that they hold: renew, finish, give back; and what is done for workers that vanished.

Every write after the claim (`store.claims`) carries the attempt and the worker's incarnation (`Holder`), and counts
only while that attempt still holds the job: a stale worker's writes are refused, and it learns so.

    with store.write() as conn:
        leases.finish(conn, claim.holder, State.succeeded, result=..., artifacts=[...])   # False: it was taken away
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Connection, and_, delete, insert, select, text, update

from torchstone.jobs import TERMINAL, State
from torchstone.store import events
from torchstone.store.engine import storable
from torchstone.store.schema import (
    artifacts,
    attempts,
    hosts,
    is_held,
    is_queued,
    jobs,
    loose_blobs,
    may_expire,
    now_us,
    placements,
    results,
)

_ONE_RECONCILER = 7086331524901


@dataclass(frozen=True)
class Holder:
    """Who holds a job: the key that every write after the claim must carry."""

    job_id: str
    attempt: int
    host: str
    incarnation: str


def renew(conn: Connection, host: str, incarnation: str, lease_s: float) -> bool:
    """Say that this run of the host lives: its leases run `lease_s` on, and the host counts as seen.

    False, and nothing is renewed, once a later run has registered under the same name.
    """
    seen = update(hosts).where(hosts.c.name == host, hosts.c.incarnation == incarnation).values(seen_us=now_us())
    if conn.execute(seen).rowcount == 0:
        return False
    mine = and_(placements.c.host == host, placements.c.incarnation == incarnation, is_held)
    if conn.dialect.name == "postgresql":
        # An UPDATE locks its rows in any order; whoever takes several jobs back at once locks them in this one.
        conn.execute(select(placements.c.job_id).where(mine).order_by(placements.c.job_id).with_for_update())
    conn.execute(update(placements).where(mine).values(lease_until_us=now_us() + int(lease_s * 1e6)))
    return True


def held(conn: Connection, host: str, incarnation: str) -> dict[tuple[str, int], str]:
    """The state of each job that this run of the host holds, by (job_id, attempt): which to cancel, which are gone."""
    query = (
        select(placements.c.job_id, placements.c.attempt, jobs.c.state)
        .join(jobs, jobs.c.id == placements.c.job_id)
        .where(placements.c.host == host, placements.c.incarnation == incarnation, is_held)
    )
    return {(row.job_id, row.attempt): row.state for row in conn.execute(query)}


def holds(conn: Connection, holder: Holder) -> bool:
    """Whether this attempt still holds its job, which stays so until the transaction ends."""
    return still_held(conn, holder) is not None


def progress(conn: Connection, holder: Holder, document: dict[str, Any] | None) -> bool:
    """Show how far the job is, if there is something new; False if this attempt no longer holds it."""
    if still_held(conn, holder) is None:
        return False
    if document is not None:
        conn.execute(update(jobs).where(jobs.c.id == holder.job_id).values(progress=_json(document)))
        events.add(conn, holder.job_id, "progress", document)
    return True


def finish(
    conn: Connection,
    holder: Holder,
    outcome: State,
    *,
    result: str | None = None,
    error: dict[str, Any] | None = None,
    files: Sequence[dict[str, Any]] = (),
    reason: str | None = None,
    receipt: dict[str, Any] | None = None,
) -> State | None:
    """End the job: the state it got, or None if this attempt no longer holds it and nothing was written.

    A job that is being cancelled becomes `canceled`, whatever its process had to say at the end; what it had measured
    by then stays. `files` are rows of artifacts: name, media_type, bytes, sha256. `receipt`, where the worker had to
    end its processes, is a `torchstone.jobs.Receipt`. Saying it twice, because the answer to the first time got lost,
    changes nothing and gives the same answer.
    """
    assert outcome in TERMINAL, outcome
    state = still_held(conn, holder)
    if state is None:
        return _ended_by(conn, holder)
    final = State.canceled if state == State.canceling else outcome
    conn.execute(
        update(jobs)
        .where(jobs.c.id == holder.job_id)
        .values(
            state=final.value,
            finished_us=now_us(),
            error=None if error is None or final is State.canceled else _json(error),
        )
    )
    if result is not None:
        conn.execute(insert(results).values(job_id=holder.job_id, result=result))
    if files:
        conn.execute(insert(artifacts).values(created_us=now_us()), [{"job_id": holder.job_id, **f} for f in files])
        mine = and_(loose_blobs.c.job_id == holder.job_id, loose_blobs.c.attempt == holder.attempt)
        conn.execute(delete(loose_blobs).where(mine, loose_blobs.c.sha256.in_({f["sha256"] for f in files})))
    if final is State.canceled:
        reason = "canceled on request"
    elif error is not None:
        reason = str(error.get("message"))
    _release(conn, holder.job_id, holder.attempt, final.value, reason, receipt)
    event: dict[str, Any] = {"state": final.value, "attempt": holder.attempt}
    if error is not None and final is State.failed:
        event["error"] = error
    events.add(conn, holder.job_id, "state", event)
    return final


def _ended_by(conn: Connection, holder: Holder) -> State | None:
    """The state in which this very attempt ended its job, if it did."""
    query = (
        select(attempts.c.outcome)
        .join(placements, and_(placements.c.job_id == attempts.c.job_id, placements.c.attempt == attempts.c.number))
        .where(
            attempts.c.job_id == holder.job_id,
            attempts.c.number == holder.attempt,
            attempts.c.outcome.in_((State.succeeded.value, State.failed.value)),
            placements.c.host == holder.host,
            placements.c.incarnation == holder.incarnation,
        )
    )
    outcome = conn.scalar(query)
    return None if outcome is None else State(outcome)


def give_back(
    conn: Connection,
    holder: Holder,
    reason: str,
    *,
    spent: bool,
    max_attempts: int,
    receipt: dict[str, Any] | None = None,
) -> State | None:
    """The attempt ends without a result: back to the queue, or `worker_lost` when `max_attempts` were spent so.

    `spent`: whether it counts (a vanished worker does, an orderly hand-back does not). None if no longer held.
    """
    return _take_back(conn, holder, reason, spent=spent, max_attempts=max_attempts, receipt=receipt)


def take_back_from(conn: Connection, host: str, incarnation: str, reason: str, *, max_attempts: int) -> list[Holder]:
    """Take every job back from earlier runs of `host` (not `incarnation`): its worker restarted. Who held them."""
    earlier = and_(placements.c.host == host, placements.c.incarnation != incarnation, is_held)
    return [
        holder
        for holder in _holders(conn, earlier)
        if _take_back(conn, holder, reason, spent=True, max_attempts=max_attempts)
    ]


def clock_us(conn: Connection) -> int:
    """The database's clock now."""
    now: int = conn.execute(select(now_us())).scalar_one()
    return now


def shorten(conn: Connection, lease_s: float) -> None:
    """After the database's clock was set back: no lease is longer than one, and nobody was heard of in the future."""
    latest_us = now_us() + int(lease_s * 1e6)
    conn.execute(
        update(placements).where(is_held, placements.c.lease_until_us > latest_us).values(lease_until_us=latest_us)
    )
    conn.execute(update(hosts).where(hosts.c.seen_us > now_us()).values(seen_us=now_us()))


def reconcile(
    conn: Connection, *, max_attempts: int, ring_again_s: float, spare_leases: bool = False
) -> tuple[list[Holder], list[tuple[str, int]]]:
    """Put right what nobody else will: expired leases, jobs that waited too long, doorbells that got lost.

    Returns who held the jobs that were taken back, and the gangs (device_type, device_count) to ring for: each that has
    waited for `ring_again_s`, every time, until it is claimed. One process at a time; the others return nothing.
    `spare_leases`: end none this time, because their holders had no chance to renew them.
    """
    if conn.dialect.name == "postgresql" and not conn.scalar(
        text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": _ONE_RECONCILER}
    ):
        return [], []
    lost = []
    overdue = placements.c.lease_until_us < now_us()
    for holder in [] if spare_leases else _holders(conn, and_(is_held, overdue)):
        reason = f"host {holder.host} was not heard of until its lease ended"
        if _take_back(conn, holder, reason, spent=True, max_attempts=max_attempts, only_if=overdue):
            lost.append(holder)
    # A job that once started in time is not expired by the loss of its worker.
    expired = conn.execute(
        update(jobs)
        .where(may_expire, jobs.c.start_by_us <= now_us(), jobs.c.attempt == 0)
        .values(state=State.expired.value, finished_us=now_us())
        .returning(jobs.c.id, jobs.c.created_us, jobs.c.start_by_us)
    )
    for row in expired.fetchall():
        within_s = (row.start_by_us - row.created_us) / 1e6
        told = {"code": "expired", "message": f"it was not started within {within_s:g} s, as start_within_s asks"}
        conn.execute(update(jobs).where(jobs.c.id == row.id).values(error=orjson.dumps(told).decode()))
        events.add(conn, row.id, "state", {"state": "expired"})
    unheard = select(jobs.c.device_type, jobs.c.device_count).where(
        is_queued, jobs.c.rung_us <= now_us() - int(ring_again_s * 1e6)
    )
    return lost, [(row.device_type, row.device_count) for row in conn.execute(unheard.distinct())]


def _holders(conn: Connection, condition: ColumnElement[bool]) -> list[Holder]:
    columns = (placements.c.job_id, placements.c.attempt, placements.c.host, placements.c.incarnation)
    # Sorted here: for an ORDER BY job_id SQLite would read every placement there ever was.
    found = [Holder(*row) for row in conn.execute(select(*columns).where(condition))]
    return sorted(found, key=lambda holder: holder.job_id)


def still_held(conn: Connection, holder: Holder, only_if: ColumnElement[bool] | None = None) -> str | None:
    """The job's state if `holder` is its current, unreleased attempt; locks the job until the transaction ends.

    First the lock, then the question: on PostgreSQL the answer would otherwise be of a moment before the lock was free.
    """
    job = conn.execute(
        select(jobs.c.state, jobs.c.attempt).where(jobs.c.id == holder.job_id).with_for_update(key_share=True)
    ).first()
    if job is None or job.attempt != holder.attempt or job.state not in (State.running, State.canceling):
        return None
    held_now = and_(
        placements.c.job_id == holder.job_id,
        placements.c.attempt == holder.attempt,
        placements.c.host == holder.host,
        placements.c.incarnation == holder.incarnation,
        is_held,
    )
    if only_if is not None:
        held_now = and_(held_now, only_if)
    # Locked too, so that a lease is not renewed while it is being taken away.
    placement = select(placements.c.job_id).where(held_now).with_for_update()
    return None if conn.scalar(placement) is None else str(job.state)


def _take_back(
    conn: Connection,
    holder: Holder,
    reason: str,
    *,
    spent: bool,
    max_attempts: int,
    only_if: ColumnElement[bool] | None = None,
    receipt: dict[str, Any] | None = None,
) -> State | None:
    """End an attempt that brought no result; None if it no longer holds its job, or `only_if` is not true of it."""
    held_state = still_held(conn, holder, only_if)
    if held_state is None:
        return None
    lost = conn.execute(select(jobs.c.lost).where(jobs.c.id == holder.job_id)).scalar_one() + spent
    values: dict[str, Any] = {"lost": lost}
    event: dict[str, Any] = {"attempt": holder.attempt, "reason": reason}
    if held_state == State.canceling:
        state, outcome = State.canceled, "canceled"
        values["finished_us"] = now_us()
    elif spent and lost >= max_attempts:
        state, outcome = State.failed, "lost"
        message = f"the worker was lost {lost} times, the last time: {reason}"
        event["error"] = {"code": "worker_lost", "message": message}
        values |= {"finished_us": now_us(), "error": _json(event["error"])}
    else:
        state, outcome = State.queued, "lost" if spent else "returned"
        values |= {"started_us": None, "progress": None, "rung_us": 0}
    conn.execute(update(jobs).where(jobs.c.id == holder.job_id).values(state=state.value, **values))
    _release(conn, holder.job_id, holder.attempt, outcome, reason, receipt)
    events.add(conn, holder.job_id, "state", {"state": state.value, **event})
    return state


def _release(
    conn: Connection, job_id: str, attempt: int, outcome: str, reason: str | None, receipt: dict[str, Any] | None
) -> None:
    conn.execute(
        update(placements)
        .where(placements.c.job_id == job_id, placements.c.attempt == attempt)
        .values(released_us=now_us())
    )
    conn.execute(
        update(attempts)
        .where(attempts.c.job_id == job_id, attempts.c.number == attempt)
        .values(
            finished_us=now_us(),
            outcome=outcome,
            reason=None if reason is None else storable(reason),
            receipt=None if receipt is None else _json(receipt),
        )
    )


def _json(document: dict[str, Any]) -> str:
    return orjson.dumps(document).decode()
