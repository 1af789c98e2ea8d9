"""Jobs as rows: accept, read, list, cancel. Everything that a worker does to a job is in `leases`.

new = NewJob.of(spec, memory_bytes=...)
with store.write() as conn:
    [stored] = jobs.insert_many(conn, [new])       # many at once share one commit
with store.read() as conn:
    jobs.get(conn, stored.job_id)             # the JSON document's parts, or None
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    func,
    insert,
    select,
    text,
    update,
)

from torchstone.errors import Conflict, InvalidRequest
from torchstone.jobs import State, is_terminal, rfc3339
from torchstone.scheduling import PRIORITIES, rank_us
from torchstone.specs import SPEC_VERSION, BaseSpec
from torchstone.store import events
from torchstone.store.ids import new_id
from torchstone.store.rows import rows
from torchstone.store.schema import attempts, idempotency_keys, is_queued, jobs, labels, now_us, placements, results

_MOST_BYTES = 2**63 - 1  # what a column holds; no machine has that much either
MOST_AHEAD = 200
"""A queue position is counted up to here, so that polling costs the same however deep the queue is."""


@dataclass(frozen=True)
class NewJob:
    """A job about to be accepted: its row's values, and how a repeated request is recognised."""

    job_id: str
    row: dict[str, Any]
    labels: dict[str, str]
    idempotency_key: str | None
    body_sha256: str

    @classmethod
    def of(
        cls,
        spec: BaseSpec,
        *,
        memory_bytes: int = 0,
        owner: str | None = None,
        idempotency_key: str | None = None,
    ) -> NewJob:
        """The row of a new job for a checked `spec`; `memory_bytes` is the least that it takes."""
        job_id = new_id()
        text = spec.model_dump_json()
        row = {
            "id": job_id,
            "kind": spec.kind,
            "name": spec.name,
            "labels": orjson.dumps(spec.labels).decode(),
            "owner": owner,
            "spec_version": SPEC_VERSION,
            "spec": text,
            "state": State.queued.value,
            "priority": PRIORITIES[spec.priority.value],
            "device_type": spec.devices.type,
            "device_count": spec.devices.count,
            "isolation": spec.isolation,
            "memory_bytes": min(memory_bytes, _MOST_BYTES),
            "timeout_s": spec.timeout_s,
            "start_within_us": None if spec.start_within_s is None else int(spec.start_within_s * 1e6),
        }
        return cls(job_id, row, dict(spec.labels), idempotency_key, hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True)
class Stored:
    """The outcome of one NewJob: which job stands for it now, and whether it is the first request of its key."""

    job_id: str
    created: bool
    created_us: int = 0  # of a new job
    key_reused: bool = False
    """The Idempotency-Key was used before with another body: nothing was stored."""


def insert_many(conn: Connection, new: Sequence[NewJob]) -> list[Stored]:
    """Accept `new` jobs in one go; one Stored each, in order.

    A key that was seen before, in the database or earlier in `new`, gives the job of then if the body is the same.
    Ten requests at once with one key make one job, whichever processes they reach.
    """
    known = _known_keys(conn, [job.idempotency_key for job in new if job.idempotency_key])
    now = conn.scalar(select(now_us()))
    assert now is not None
    outcome: list[Stored] = []
    fresh: list[NewJob] = []
    for job in new:
        key = job.idempotency_key
        if key is not None and key in known:
            job_id, body_sha256 = known[key]
            same = body_sha256 == job.body_sha256
            outcome.append(Stored(job_id, created=False, key_reused=not same))
            continue
        if key is not None:
            known[key] = (job.job_id, job.body_sha256)
        fresh.append(job)
        outcome.append(Stored(job.job_id, created=True, created_us=now))
    if fresh:
        conn.execute(insert(jobs), [_row(job, now) for job in fresh])
        label_rows = [{"key": k, "value": v, "job_id": job.job_id} for job in fresh for k, v in job.labels.items()]
        if label_rows:
            conn.execute(insert(labels), label_rows)
        keys = [
            {"key": job.idempotency_key, "body_sha256": job.body_sha256, "job_id": job.job_id}
            for job in fresh
            if job.idempotency_key is not None
        ]
        if keys:
            conn.execute(insert(idempotency_keys), keys)
        events.add_many(conn, [(job.job_id, now, "state", {"state": "queued"}) for job in fresh])
    return outcome


def as_stored(job: NewJob, stored: Stored) -> dict[str, Any]:
    """What `get` would answer for a job that was just created, without asking."""
    unset = dict.fromkeys(("started_us", "finished_us", "progress", "error", "result"))
    return {**job.row, **unset, "created_us": stored.created_us, "attempts": []}


def knows_key(conn: Connection, key: str) -> bool:
    """Whether a job was accepted under this idempotency key."""
    return conn.scalar(select(idempotency_keys.c.job_id).where(idempotency_keys.c.key == key)) is not None


def _known_keys(conn: Connection, keys: Sequence[str]) -> dict[str, tuple[str, str]]:
    if not keys:
        return {}
    if conn.dialect.name == "postgresql":
        # Whoever else brings one of these keys now waits here, and then finds the job in the table. Sorted, so that
        # two batches never wait for each other. (SQLite's write transactions are one at a time.)
        numbers = sorted({int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], signed=True) for key in keys})
        conn.execute(text("SELECT pg_advisory_xact_lock(n) FROM unnest(CAST(:n AS bigint[])) AS n"), {"n": numbers})
    query = select(idempotency_keys).where(idempotency_keys.c.key.in_(keys))
    return {row.key: (row.job_id, row.body_sha256) for row in conn.execute(query)}


def _row(job: NewJob, now: int) -> dict[str, Any]:
    row = dict(job.row)
    start_within_us = row.pop("start_within_us")
    start_by_us = None if start_within_us is None else now + start_within_us
    rank = rank_us(now, row["priority"])
    return {**row, "created_us": now, "rank_us": rank, "rung_us": now, "start_by_us": start_by_us}


# Built once: SQLAlchemy takes longer to build a statement than SQLite to run it.
_OF_JOB = jobs.c.id == bindparam("job_id")
_JOB = select(jobs, results.c.result).outerjoin(results, results.c.job_id == jobs.c.id).where(_OF_JOB)
_STATE = select(jobs.c.state).where(_OF_JOB)
_SUMMARY = select(*[c for c in jobs.c if c.name not in ("memory_bytes", "rank_us", "rung_us", "start_by_us", "lost")])
_ATTEMPTS = (
    select(attempts, placements.c.host, placements.c.devices)
    .outerjoin(placements, and_(placements.c.job_id == attempts.c.job_id, placements.c.attempt == attempts.c.number))
    .where(attempts.c.job_id == bindparam("job_id"))
    .order_by(attempts.c.number)
)


def get(conn: Connection, job_id: str) -> dict[str, Any] | None:
    """The row of a job with `result` (JSON text or None) and `attempts` (list of dicts); None if there is none."""
    for row in rows(conn, _JOB, job_id=job_id):
        row["attempts"] = attempts_of(conn, job_id) if row["attempt"] else []
        return row
    return None


def state_of(conn: Connection, job_id: str) -> str | None:
    """Only the state of a job: what a long poll looks at."""
    found = rows(conn, _STATE, job_id=job_id)
    return str(found[0]["state"]) if found else None


def states_of(conn: Connection, job_ids: Sequence[str]) -> dict[str, str]:
    """The states of many jobs at once, by id: one query for everybody who waits in this process."""
    query = select(jobs.c.id, jobs.c.state).where(jobs.c.id.in_(job_ids))
    return {row.id: row.state for row in conn.execute(query)}


def attempts_of(conn: Connection, job_id: str) -> list[dict[str, Any]]:
    """The attempts of a job in order, in the shape of `torchstone.jobs.Attempt`."""
    return [
        {
            "number": row["number"],
            "host": row["host"],
            "devices": orjson.loads(row["devices"]) if row["devices"] else [],
            "started_at": rfc3339(row["started_us"]),
            "finished_at": rfc3339(row["finished_us"]),
            "outcome": row["outcome"],
            "reason": row["reason"],
            "receipt": orjson.loads(row["receipt"]) if row["receipt"] else None,
        }
        for row in rows(conn, _ATTEMPTS, job_id=job_id)
    ]


def page(
    conn: Connection,
    *,
    states: Sequence[str] = (),
    kind: str | None = None,
    label: tuple[str, str] | None = None,
    before: str | None = None,
    limit: int = 50,
) -> list[dict[str, Any]]:
    """Up to `limit` jobs, newest first, older than the id `before`; rows without their results.

    A keyset page: each filter has an index that ends in the id, so the cost is flat at any depth. Only a label together
    with a state or kind that few of its jobs have costs as much as the label has jobs.
    """
    values = {"kind": kind, "before": before, "limit": limit}
    if label is not None:
        values |= {"key": label[0], "value": label[1]}
    if kind is not None and label is None:
        states = states or list(State)  # the index by kind has the state before the id
    query = _page(label is not None, kind is not None, before is not None, bool(states))
    found: list[dict[str, Any]] = []
    # One range of an index for each state; IN would read and sort every job in any of them.
    for state in dict.fromkeys(states) or [None]:
        found += rows(conn, query, **values, state=state)
    return sorted(found, key=lambda row: str(row["id"]), reverse=True)[:limit]


@cache
def _page(by_label: bool, by_kind: bool, further: bool, by_state: bool) -> Select[*tuple[Any, ...]]:
    """The statement for a page with these filters."""
    column: ColumnElement[str] = labels.c.job_id if by_label else jobs.c.id
    query = _SUMMARY
    if by_label:
        query = query.join(labels, labels.c.job_id == jobs.c.id)
        query = query.where(labels.c.key == bindparam("key"), labels.c.value == bindparam("value"))
    if by_kind:
        query = query.where(jobs.c.kind == bindparam("kind"))
    if further:
        query = query.where(column < bindparam("before"))
    if by_state:
        query = query.where(jobs.c.state == bindparam("state"))
    return query.order_by(column.desc()).limit(bindparam("limit"))


def _count_ahead() -> Select[int]:
    # In the index's order: else PostgreSQL may think that it soon meets enough of them anywhere in the table.
    queued = select(jobs.c.id).where(is_queued).order_by(jobs.c.rank_us, jobs.c.id).limit(MOST_AHEAD)
    earlier = queued.where(jobs.c.rank_us < bindparam("rank_us")).subquery()
    at_once = queued.where(jobs.c.rank_us == bindparam("rank_us"), jobs.c.id < bindparam("job_id")).subquery()
    # Two ranges of the index; one condition with OR would be no range of it at all.
    counts = [select(func.count()).select_from(part).scalar_subquery() for part in (earlier, at_once)]
    return select((counts[0] + counts[1]).label("ahead"))


_AHEAD = _count_ahead()


def ahead_of(conn: Connection, job_id: str, rank: int) -> int:
    """How many queued jobs come before this one of that `rank_us`, counted up to MOST_AHEAD."""
    return min(int(rows(conn, _AHEAD, job_id=job_id, rank_us=rank)[0]["ahead"]), MOST_AHEAD)


def cancel(conn: Connection, job_id: str) -> str | None:
    """Ask for an end: queued -> canceled at once, running -> canceling; the state now, None if there is no such job.

    Asking again while it is canceling is harmless. Raises Conflict when the job has already ended.
    """
    # Locked first: a job that is claimed or taken back in this moment is in the one state or the other, never missed.
    state = conn.scalar(select(jobs.c.state).where(jobs.c.id == job_id).with_for_update(key_share=True))
    if state is None or state == State.canceling:
        return state
    if is_terminal(state):
        raise Conflict(f"the job has already ended: it is {state}")
    values: dict[str, Any] = {"state": State.canceling.value}
    if state == State.queued:
        values = {"state": State.canceled.value, "finished_us": now_us()}
    conn.execute(update(jobs).where(jobs.c.id == job_id).values(values))
    events.add(conn, job_id, "state", {"state": values["state"]})
    return str(values["state"])


def check_capacity(spec: BaseSpec, memory_bytes: int, hosts: Sequence[dict[str, Any]]) -> None:
    """Refuse what no registered host could ever run; with no host registered yet, anything may wait.

    `hosts` as from `hosts.living`. Raises InvalidRequest with a pointer.
    """
    if not hosts:
        return
    wanted, count = spec.devices.type, spec.devices.count
    kinds = ("cuda", "cpu") if wanted == "auto" else (wanted,)
    reachable = max(host[f"{kind}_count"] for host in hosts for kind in kinds)
    if reachable == 0:
        detail = f"no registered host has a {wanted} device"
        raise InvalidRequest(detail, errors=[{"pointer": "/devices/type", "detail": detail}])
    if count > reachable:
        kind = "" if wanted == "auto" else f"{wanted} "
        detail = f"{count} {kind}devices asked for; the most that one registered host has is {reachable}"
        raise InvalidRequest(detail, errors=[{"pointer": "/devices/count", "detail": detail}])
    fitting = [host for host in hosts if max(host[f"{kind}_count"] for kind in kinds) >= count]
    biggest = max(host["memory_bytes"] for host in fitting)
    if memory_bytes > biggest:
        of_model = hasattr(spec, "model")
        detail = (
            f"{'the model' if of_model else 'it'} needs at least {memory_bytes / 1e9:.1f} GB; "
            f"the most that a registered host gives a job is {biggest / 1e9:.1f} GB"
        )
        pointer = "/model" if of_model else "/size"
        raise InvalidRequest(detail, errors=[{"pointer": pointer, "detail": detail}])
