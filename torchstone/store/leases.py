"""What workers do to jobs: claim, renew, finish, give back; and what is done for workers that vanished.

Every write after the claim carries the attempt and the worker's incarnation (`Holder`) and takes effect only while
that attempt still holds the job: a stale worker's writes are refused, and it learns so.

    with store.write() as conn:
        claim = leases.claim(conn, host, lease_s=30)          # one job, all its devices, or None
    ...
    with store.write() as conn:
        leases.finish(conn, claim.holder, State.succeeded, result=..., artifacts=[...])   # False: it was taken away
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Connection, insert, select, text, update

from torchstone.jobs import State
from torchstone.scheduling import HostView, Waiting, choose
from torchstone.store import events
from torchstone.store.hosts import Host, most_cuda
from torchstone.store.schema import artifacts, attempts, hosts, jobs, now_us, placements, results

CANDIDATES = 256
"""How many waiting jobs a claim looks at: more than that many in a row that one host cannot run is another host's."""


@dataclass(frozen=True)
class Holder:
    """Who holds a job: the key that every write after the claim must carry."""

    job_id: str
    attempt: int
    host: str
    incarnation: str


@dataclass(frozen=True)
class Claim:
    """A job that this host now runs."""

    holder: Holder
    spec: str
    devices: tuple[str, ...]
    exclusive: bool
    timeout_s: float


def claim(conn: Connection, host: Host, lease_s: float) -> Claim | None:
    """Take the next job that `host` should run, with all its devices; None when there is none for now."""
    if conn.dialect.name == "postgresql":
        # SQLite's write transactions are one at a time anyway; here the machine's own row is the turnstile.
        conn.execute(
            select(hosts.c.name).where(hosts.c.machine == host.machine).order_by(hosts.c.name).with_for_update()
        )
    view = _view(conn, host, lease_s)
    if view.taken_whole:
        return None
    choice = choose(view, _waiting(conn, host))
    if choice is None:
        return None
    row = conn.execute(
        update(jobs)
        .where(jobs.c.id == choice.job_id, jobs.c.state == State.queued.value)
        .values(
            state=State.running.value,
            attempt=jobs.c.attempt + 1,
            started_us=now_us(),
            progress=None,
        )
        .returning(jobs.c.attempt, jobs.c.spec, jobs.c.timeout_s)
    ).first()
    if row is None:
        return None
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
    held = select(placements.c.devices, placements.c.exclusive).where(
        placements.c.machine == host.machine, placements.c.released_us.is_(None)
    )
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
        cuda_elsewhere=most_cuda(conn, lease_s),
    )


def _waiting(conn: Connection, host: Host) -> list[Waiting]:
    most = max(host.count("cuda"), host.count("cpu"))
    query = (
        select(jobs.c.id, jobs.c.device_type, jobs.c.device_count, jobs.c.isolation, jobs.c.memory_bytes)
        .where(jobs.c.state == State.queued.value, jobs.c.device_count <= most)
        .order_by(jobs.c.priority.desc(), jobs.c.id)
        .limit(CANDIDATES)
    )
    return [Waiting(*row) for row in conn.execute(query)]


def renew(conn: Connection, host: str, incarnation: str, lease_s: float) -> None:
    """Say that this run of the host lives: its leases run `lease_s` on, and the host counts as seen."""
    conn.execute(
        update(placements)
        .where(placements.c.host == host, placements.c.incarnation == incarnation, placements.c.released_us.is_(None))
        .values(lease_until_us=now_us() + int(lease_s * 1e6))
    )
    conn.execute(update(hosts).where(hosts.c.name == host, hosts.c.incarnation == incarnation).values(seen_us=now_us()))


def held(conn: Connection, host: str, incarnation: str) -> dict[tuple[str, int], str]:
    """The state of each job that this run of the host holds, by (job_id, attempt): which to cancel, which are gone."""
    query = (
        select(placements.c.job_id, placements.c.attempt, jobs.c.state)
        .join(jobs, jobs.c.id == placements.c.job_id)
        .where(placements.c.host == host, placements.c.incarnation == incarnation, placements.c.released_us.is_(None))
    )
    return {(row.job_id, row.attempt): row.state for row in conn.execute(query)}


def progress(conn: Connection, holder: Holder, document: dict[str, Any] | None) -> bool:
    """Show how far the job is, if there is something new; False if this attempt no longer holds it."""
    if _still_held(conn, holder) is None:
        return False
    if document is None:
        return True
    conn.execute(update(jobs).where(jobs.c.id == holder.job_id).values(progress=orjson.dumps(document).decode()))
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
) -> State | None:
    """End the job: the state it got, or None if this attempt no longer holds it and nothing was written.

    A job that is being cancelled becomes `canceled`, whatever its process had to say at the end; what it had measured
    by then stays. `files` are rows of artifacts: name, media_type, bytes, sha256.
    """
    state = _still_held(conn, holder)
    if state is None:
        return None
    final = State.canceled if state == State.canceling else outcome
    conn.execute(
        update(jobs)
        .where(jobs.c.id == holder.job_id)
        .values(
            state=final.value,
            finished_us=now_us(),
            error=None if error is None or final is State.canceled else orjson.dumps(error).decode(),
        )
    )
    if result is not None:
        conn.execute(insert(results).values(job_id=holder.job_id, result=result))
    if files:
        conn.execute(insert(artifacts), [{"job_id": holder.job_id, "created_us": _now(conn), **file} for file in files])
    if final is State.canceled:
        reason = "canceled on request"
    elif error is not None:
        reason = str(error.get("message"))
    _release(conn, holder.job_id, holder.attempt, final.value, reason)
    event: dict[str, Any] = {"state": final.value, "attempt": holder.attempt}
    if error is not None and final is State.failed:
        event["error"] = error
    events.add(conn, holder.job_id, "state", event)
    return final


def give_back(conn: Connection, holder: Holder, reason: str, *, spent: bool, max_attempts: int) -> State | None:
    """The attempt ends without a result: back to the queue, or `worker_lost` when `max_attempts` were spent so.

    `spent`: whether it counts (a vanished worker does, an orderly hand-back does not). None if no longer held.
    """
    if _still_held(conn, holder) is None:
        return None
    return _take_back(conn, holder.job_id, holder.attempt, reason, spent=spent, max_attempts=max_attempts)


def take_back_from(conn: Connection, host: str, incarnation: str, reason: str, *, max_attempts: int) -> list[str]:
    """Take every job back from earlier runs of `host` (not `incarnation`): its worker restarted. Their ids."""
    query = select(placements.c.job_id, placements.c.attempt).where(
        placements.c.host == host, placements.c.incarnation != incarnation, placements.c.released_us.is_(None)
    )
    lost = list(conn.execute(query))
    for row in lost:
        _take_back(conn, row.job_id, row.attempt, reason, spent=True, max_attempts=max_attempts)
    return [row.job_id for row in lost]


def reconcile(conn: Connection, *, max_attempts: int, ring_again_s: float) -> tuple[list[str], list[tuple[str, int]]]:
    """Put right what nobody else will: expired leases, jobs that waited too long, doorbells that got lost.

    Returns the ids of jobs taken back, and the gangs (device_type, device_count) to ring for. One process at a time.
    """
    if conn.dialect.name == "postgresql" and not conn.scalar(text("SELECT pg_try_advisory_xact_lock(7086331524901)")):
        return [], []
    lost = list(
        conn.execute(
            select(placements.c.job_id, placements.c.attempt, placements.c.host).where(
                placements.c.released_us.is_(None), placements.c.lease_until_us < now_us()
            )
        )
    )
    for row in lost:
        reason = f"host {row.host} was not heard of until its lease ended"
        _take_back(conn, row.job_id, row.attempt, reason, spent=True, max_attempts=max_attempts)
    expired = conn.execute(
        update(jobs)
        .where(jobs.c.state == State.queued.value, jobs.c.start_by_us < now_us())
        .values(state=State.expired.value, finished_us=now_us())
        .returning(jobs.c.id)
    )
    for row in expired.fetchall():
        events.add(conn, row.id, "state", {"state": "expired"})
    unheard = select(jobs.c.device_type, jobs.c.device_count).where(
        jobs.c.state == State.queued.value, jobs.c.rung_us < now_us() - int(ring_again_s * 1e6)
    )
    gangs = [(row.device_type, row.device_count) for row in conn.execute(unheard.distinct())]
    if gangs:
        conn.execute(
            update(jobs)
            .where(jobs.c.state == State.queued.value, jobs.c.rung_us < now_us() - int(ring_again_s * 1e6))
            .values(rung_us=now_us())
        )
    return [row.job_id for row in lost], gangs


def _still_held(conn: Connection, holder: Holder) -> str | None:
    """The job's state if `holder` is its current, unreleased attempt; locks the row on PostgreSQL."""
    query = (
        select(jobs.c.state)
        .join(placements, placements.c.job_id == jobs.c.id)
        .where(
            jobs.c.id == holder.job_id,
            jobs.c.attempt == holder.attempt,
            jobs.c.state.in_((State.running.value, State.canceling.value)),
            placements.c.attempt == holder.attempt,
            placements.c.host == holder.host,
            placements.c.incarnation == holder.incarnation,
            placements.c.released_us.is_(None),
        )
        .with_for_update(of=jobs)
    )
    return conn.scalar(query)


def _take_back(conn: Connection, job_id: str, attempt: int, reason: str, *, spent: bool, max_attempts: int) -> State:
    row = conn.execute(select(jobs.c.state, jobs.c.lost).where(jobs.c.id == job_id).with_for_update()).one()
    lost = row.lost + spent
    values: dict[str, Any] = {"lost": lost}
    event: dict[str, Any] = {"attempt": attempt, "reason": reason}
    if row.state == State.canceling:
        state, outcome = State.canceled, "canceled"
        values["finished_us"] = now_us()
    elif lost >= max_attempts:
        state, outcome = State.failed, "lost"
        message = f"the worker was lost {lost} times, the last time: {reason}"
        values |= {
            "finished_us": now_us(),
            "error": orjson.dumps({"code": "worker_lost", "message": message}).decode(),
        }
        event["error"] = {"code": "worker_lost", "message": message}
    else:
        state, outcome = State.queued, "lost" if spent else "returned"
        values |= {"started_us": None, "progress": None, "rung_us": 0}
    conn.execute(update(jobs).where(jobs.c.id == job_id).values(state=state.value, **values))
    _release(conn, job_id, attempt, outcome, reason)
    events.add(conn, job_id, "state", {"state": state.value, **event})
    return state


def _release(conn: Connection, job_id: str, attempt: int, outcome: str, reason: str | None) -> None:
    conn.execute(
        update(placements)
        .where(placements.c.job_id == job_id, placements.c.attempt == attempt)
        .values(released_us=now_us())
    )
    conn.execute(
        update(attempts)
        .where(attempts.c.job_id == job_id, attempts.c.number == attempt)
        .values(finished_us=now_us(), outcome=outcome, reason=reason)
    )


def _now(conn: Connection) -> int:
    now: int = conn.execute(select(now_us())).scalar_one()
    return now
