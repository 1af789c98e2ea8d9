"""Watching a job: its events as server-sent events, and what it prints.

    curl -N localhost:8000/v1/jobs/01938c5e-.../events
    curl localhost:8000/v1/jobs/01938c5e-.../logs?follow=true

Events are numbered: a client that was cut off says the last number that it saw (`Last-Event-ID`, as browsers do by
themselves) and gets what came after it, without a gap. The stream ends after the event that ends the job; who comes
back after that gets 204, which tells a browser to stop asking.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from service.openapi import EVENT_PARAMETERS, LOG_PARAMETERS
from service.queries import Query
from service.routes import get, plain_router
from service.routes.jobs import find
from service.runtime import Runtime, of
from torchstone.errors import BadRequest, NotFound
from torchstone.jobs import TERMINAL
from torchstone.store import events, jobs, logs

router = plain_router(prefix="/v1/jobs/{job_id}", tags=["watching"])
_PING_S = 15
_LOOK_AGAIN_S = 30.0
_FOLLOW_EVERY_S = 0.2


@get(
    router,
    "/events",
    summary="Watch a job's events (SSE)",
    responses={200: {"content": {"text/event-stream": {}}}, 204: {"description": "The job is over, nothing follows"}},
    openapi_extra={"parameters": EVENT_PARAMETERS},
)
async def stream_events(job_id: str, request: Request) -> Response:
    from sse_starlette import EventSourceResponse

    Query(request)
    runtime = of(request)
    row = await find(runtime, job_id)
    last_id = _last_event_id(request)
    if row["state"] in TERMINAL and not await runtime.database.read(events.after, job_id, last_id, 1):
        return Response(None, 204)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if request.method == "HEAD":
        return Response(None, 200, headers, "text/event-stream")
    return EventSourceResponse(_events(runtime, job_id, last_id), headers=headers, ping=_PING_S, sep="\n")


def _last_event_id(request: Request) -> int:
    value = request.headers.get("last-event-id", "0")
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise BadRequest("Last-Event-ID must be the id of an event of this job")
    return int(value)


async def _events(runtime: Runtime, job_id: str, last_id: int) -> AsyncIterator[dict[str, str]]:
    with runtime.waits.watch(job_id) as watch:
        while True:
            state = await runtime.database.read(jobs.state_of, job_id)  # before the events, so that none is missed
            for event in await runtime.database.read(events.after, job_id, last_id):
                last_id = event["id"]
                data = orjson.dumps({"at": event["at"], **(document := orjson.loads(event["data"]))}).decode()
                yield {"id": str(last_id), "event": event["type"], "data": data}
                if event["type"] == "state" and document.get("state") in TERMINAL:
                    return
            if state is None or state in TERMINAL:  # deleted; or resumed after its end
                return
            await watch.changed(_LOOK_AGAIN_S)
            if watch.released:
                return


@get(
    router,
    "/logs",
    summary="What the job printed, while it runs too",
    responses={200: {"content": {"text/plain": {}}}},
    openapi_extra={"parameters": LOG_PARAMETERS},
)
async def show_logs(job_id: str, request: Request) -> Response:
    query = Query(request, "attempt", "follow")
    runtime = of(request)
    row = await find(runtime, job_id)
    attempt = query.integer("attempt", 0, least=1, most=1_000_000) if query.text("attempt") is not None else None
    follow = query.flag("follow") and request.method != "HEAD"
    if attempt is not None and attempt > row["attempt"] and not (follow and row["state"] not in TERMINAL):
        raise NotFound(f"job {row['id']} has had {row['attempt']} attempts: there is none with number {attempt}")
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Accel-Buffering": "no"}
    text = _logs(runtime, row["id"], attempt, follow)
    return StreamingResponse(text, headers=headers, media_type="text/plain; charset=utf-8")


async def _logs(runtime: Runtime, job_id: str, attempt: int | None, follow: bool) -> AsyncIterator[str]:
    """The output of one attempt, or of all in order; with `follow` until the job is over."""
    seen = (attempt or 1, -1)
    with runtime.waits.watch(job_id) as watch:
        while True:
            # Asked before the last look, so that nothing printed before the end is missed.
            row = await runtime.database.read(jobs.get, job_id)
            over = row is None or row["state"] in TERMINAL
            newest = attempt or (row["attempt"] if row else 0)
            while seen[0] <= newest:
                chunks = await runtime.database.read(logs.read, job_id, seen[0], seen[1])
                for number, seq, text in chunks:
                    seen = (number, seq)
                    yield text
                if not chunks:
                    if seen[0] == newest:
                        break
                    seen = (seen[0] + 1, -1)
            if over or not follow or watch.released:
                return
            await watch.changed(_FOLLOW_EVERY_S)
