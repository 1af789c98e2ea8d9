"""Jobs: submit, look, list, cancel, delete.

    curl -d '{"kind": "jit", "model": {"preset": "mlp"}}' localhost:8000/v1/jobs
    curl 'localhost:8000/v1/jobs/01938c5e-...?wait=30'

POST answers 202, or 200 where `Prefer: wait=N` was asked for and the job finished within that time. That holds for a
repeated request under one Idempotency-Key too, which is answered with the job of the first one and the header
`Idempotent-Replayed: true`. Two bodies are the same if they mean the same spec, defaults filled in.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Any

import orjson
from fastapi import Request, Response
from sqlalchemy import Connection

from service import bodies, documents, responses
from service.fleet import memory_bytes
from service.openapi import CREATED, LIST_PARAMETERS, SUBMIT, VALIDATE_ONLY, WAIT, shaped
from service.queries import Query, preferred_wait_s, refuse
from service.routes import get, plain_router
from service.runtime import Runtime, of
from service.waits import until_finished
from torchstone.errors import BadRequest, Gone, InvalidRequest, NotFound
from torchstone.jobs import TERMINAL, State
from torchstone.specs import BaseSpec, kinds, parse_spec
from torchstone.store import jobs, retention
from torchstone.store.jobs import NewJob

router = plain_router(prefix="/v1", tags=["jobs"])

RETRY_AFTER_S = "1"
_MOST_KEY_CHARACTERS = 255
_STATES = [state.value for state in State]
_JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


async def find(runtime: Runtime, job_id: str) -> dict[str, Any]:
    """The row of a job; of a queued one also how many are `ahead`. Raises NotFound, or Gone where it was deleted."""
    row = await runtime.database.read(_look, job_id) if _JOB_ID.fullmatch(job_id) else None
    if row is None:
        raise await _missing(runtime, job_id)
    return row


async def _missing(runtime: Runtime, job_id: str) -> NotFound | Gone:
    epitaph = await runtime.database.read(retention.epitaph, job_id) if _JOB_ID.fullmatch(job_id) else None
    if epitaph is not None:
        return Gone(f"job {job_id} was deleted: {epitaph}")
    return NotFound(f"there is no job {job_id[:80]!r}")


def _look(conn: Connection, job_id: str) -> dict[str, Any] | None:
    row = jobs.get(conn, job_id)
    if row is not None and row["state"] == State.queued:
        row["ahead"] = jobs.ahead_of(conn, job_id, row["rank_us"])
    return row


@router.post(
    "/jobs",
    status_code=202,
    response_model=None,
    summary="Submit an experiment",
    responses={
        202: shaped("Job", "Accepted", headers=CREATED),
        200: shaped("Job", "Finished within the time of Prefer: wait"),
    },
    openapi_extra={"requestBody": SUBMIT, "parameters": VALIDATE_ONLY},
)
async def submit(request: Request) -> Response:
    runtime = of(request)
    query = Query(request, "validate_only")
    body = bodies.decode(await bodies.read(request, runtime.settings.max_body_bytes))
    spec = parse_spec(body, diagnostics=runtime.settings.diagnostics)
    key = _idempotency_key(request)
    try:
        needed_bytes = await runtime.fleet.check(spec)
    except InvalidRequest:
        # What was accepted once is answered again, though the hosts that could take it may be gone by now.
        if key is None or not await runtime.database.read(jobs.knows_key, key):
            raise
        needed_bytes = memory_bytes(spec)
    if query.flag("validate_only"):
        return await _validated(runtime, spec, needed_bytes)
    new = NewJob.of(spec, memory_bytes=needed_bytes, idempotency_key=key)
    accepted = await runtime.writer.accept(new)
    stored = accepted.stored
    if stored.key_reused:
        raise InvalidRequest(f"the Idempotency-Key was used before for another spec, that of job {stored.job_id}")
    if stored.created:
        runtime.bell.ring(spec.devices.type, spec.devices.count)
    wait_s = preferred_wait_s(request, runtime.settings.max_wait_s)
    if wait_s:
        await until_finished(runtime.waits, runtime.database, request, stored.job_id, wait_s)
    if stored.created and not wait_s:
        row = {**jobs.as_stored(new, stored), "ahead": accepted.ahead}
    else:
        row = await find(runtime, stored.job_id)
    finished = bool(wait_s) and row["state"] in TERMINAL
    headers = {"Location": f"/v1/jobs/{stored.job_id}"}
    if not finished:
        headers["Retry-After"] = RETRY_AFTER_S
    if wait_s is not None:
        headers["Preference-Applied"] = f"wait={wait_s:g}"
    if not stored.created:
        headers["Idempotent-Replayed"] = "true"
    body = documents.encode(documents.job(row, await runtime.fleet.waiting_for(row)))
    return responses.json(body, 200 if finished else 202, headers)


async def _validated(runtime: Runtime, spec: BaseSpec, needed_bytes: int) -> Response:
    where, warnings = await runtime.fleet.would_run(spec, needed_bytes)
    document = {"spec": orjson.Fragment(spec.model_dump_json()), "would_run": where, "warnings": warnings}
    return responses.json(documents.encode(document))


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= _MOST_KEY_CHARACTERS and key.isascii() and key.isprintable()):
        raise BadRequest(f"Idempotency-Key must have 1 to {_MOST_KEY_CHARACTERS} printable ASCII characters")
    return key


@get(
    router,
    "/jobs/{job_id}",
    summary="Look at a job, or wait for its end",
    responses={200: shaped("Job"), 304: {"description": "Nothing changed since the ETag in If-None-Match"}},
    openapi_extra={"parameters": WAIT},
)
async def show(job_id: str, request: Request) -> Response:
    runtime = of(request)
    headers = {}
    wait_s = Query(request, "wait").seconds("wait", runtime.settings.max_wait_s)
    if wait_s is None and (wait_s := preferred_wait_s(request, runtime.settings.max_wait_s)) is not None:
        headers["Preference-Applied"] = f"wait={wait_s:g}"
    row = await find(runtime, job_id)
    if wait_s and row["state"] not in TERMINAL:
        await until_finished(runtime.waits, runtime.database, request, job_id, wait_s)
        row = await find(runtime, job_id)
    if row["state"] not in TERMINAL:
        headers["Retry-After"] = RETRY_AFTER_S
    body = documents.encode(documents.job(row, await runtime.fleet.waiting_for(row)))
    return responses.tagged_json(request, body, headers)


@get(
    router,
    "/jobs",
    summary="List jobs, newest first",
    responses={200: shaped("JobList")},
    openapi_extra={"parameters": LIST_PARAMETERS},
)
async def listing(request: Request) -> Response:
    query = Query(request, "state", "kind", "label", "limit", "cursor")
    states = [word for value in query.all("state") for word in value.split(",")]
    for state in states:
        if state not in _STATES:
            raise refuse("state", f"unknown state {state[:40]!r}; the states are: {', '.join(_STATES)}")
    kind = query.text("kind")
    known = kinds(of(request).settings.diagnostics)
    if kind is not None and kind not in known:
        raise refuse("kind", f"unknown kind {kind[:40]!r}; the kinds are: {', '.join(known)}")
    label = _label(query.text("label"))
    limit = query.integer("limit", 50, least=1, most=500)
    filters = hashlib.blake2b(orjson.dumps([sorted(set(states)), kind, label]), digest_size=6).hexdigest()
    cursor = query.text("cursor")
    before = None if cursor is None else _after_cursor(cursor, filters)
    rows = await of(request).database.read(
        jobs.page, states=states, kind=kind, label=label, before=before, limit=limit + 1
    )
    page = rows[:limit]
    following = _cursor(page[-1]["id"], filters) if len(rows) > limit else None
    document = {"items": [documents.summary(row) for row in page], "next_cursor": following}
    return responses.json(documents.encode(document))


def _label(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    key, colon, value = text.partition(":")
    if not (key and colon):
        raise refuse("label", "must be KEY:VALUE")
    return key, value


def _cursor(job_id: str, filters: str) -> str:
    return base64.urlsafe_b64encode(f"{filters}.{job_id}".encode()).decode().rstrip("=")


def _after_cursor(cursor: str, filters: str) -> str:
    """The id behind which the next page begins."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        text = ""
    given_for, _, job_id = text.partition(".")
    if not _JOB_ID.fullmatch(job_id):
        raise refuse("cursor", "is not a next_cursor of this list")
    if given_for != filters:
        raise refuse("cursor", "was given for other filters; repeat the ones of the first page, or leave it out")
    return job_id


@router.post(
    "/jobs/{job_id}/cancel",
    status_code=202,
    response_model=None,
    summary="Ask for a job's end",
    responses={202: shaped("Job", "canceled if it was queued, else canceling")},
)
async def cancel(job_id: str, request: Request) -> Response:
    runtime = of(request)
    Query(request)
    await find(runtime, job_id)
    await runtime.database.write(jobs.cancel, job_id)
    row = await find(runtime, job_id)
    body = documents.encode(documents.job(row, await runtime.fleet.waiting_for(row)))
    headers = {} if row["state"] in TERMINAL else {"Retry-After": RETRY_AFTER_S}
    return responses.json(body, 202, {"Location": f"/v1/jobs/{job_id}", **headers})


@router.delete(
    "/jobs/{job_id}",
    status_code=204,
    response_model=None,
    summary="Delete a finished job and its files",
    responses={204: {"description": "Deleted; from now on it is 410"}},
)
async def remove(job_id: str, request: Request) -> Response:
    runtime = of(request)
    Query(request)
    await find(runtime, job_id)
    if not await runtime.database.write(retention.delete_job, job_id, "deleted on request"):
        raise await _missing(runtime, job_id)  # somebody else was quicker
    runtime.collector.wake()
    return Response(None, 204)
