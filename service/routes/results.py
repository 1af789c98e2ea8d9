"""A finished job's result: as JSON, as a long tidy table in CSV, and as the table that a terminal shows.

curl localhost:8000/v1/jobs/01938c5e-.../result.txt
"""

from __future__ import annotations

from typing import Any

import orjson
from anyio import to_thread
from fastapi import Request, Response

from service import documents, responses
from service.openapi import shaped
from service.queries import Query
from service.routes import get, plain_router
from service.routes.jobs import RETRY_AFTER_S, find
from service.runtime import of
from torchstone.errors import Conflict, NotFound
from torchstone.jobs import TERMINAL

router = plain_router(prefix="/v1/jobs/{job_id}", tags=["results"])
UNFINISHED = {409: {"description": "The job is not finished yet"}}


async def _finished(request: Request, job_id: str) -> dict[str, Any]:
    """The row of a finished job. Raises Conflict while it is not."""
    Query(request)
    row = await find(of(request), job_id)
    if row["state"] not in TERMINAL:
        raise Conflict(
            f"the job is {row['state']}: it has a result once it is finished; GET /v1/jobs/{job_id}?wait=30 waits",
            headers={"Retry-After": RETRY_AFTER_S},
        )
    return row


async def measured(request: Request, job_id: str) -> dict[str, Any]:
    """The row of a job that has a result. Raises NotFound where it ended without one."""
    row = await _finished(request, job_id)
    if row["result"] is None:
        why = f": {orjson.loads(row['error'])['message']}" if row["error"] else ""
        raise NotFound(f"the job is {row['state']} and measured nothing{why}")
    return row


def document(row: dict[str, Any]) -> Any:
    """The job as clients see it."""
    return orjson.loads(documents.encode(documents.job(row, None)))


@get(
    router,
    "/result.json",
    summary="The result as JSON",
    responses={200: shaped("Result"), **UNFINISHED},
)
async def as_json(job_id: str, request: Request) -> Response:
    row = await measured(request, job_id)
    return responses.tagged_json(request, row["result"].encode(), {})


@get(
    router,
    "/result.csv",
    summary="The result as a long tidy table",
    responses={200: {"content": {"text/csv": {}}}, **UNFINISHED},
)
async def as_csv(job_id: str, request: Request) -> Response:
    from torchstone.render import csv

    text = await to_thread.run_sync(csv, document(await measured(request, job_id)))
    headers = {"Content-Disposition": f'inline; filename="{job_id}.csv"', "X-Content-Type-Options": "nosniff"}
    return Response(text, headers=headers, media_type="text/csv; charset=utf-8")


@get(
    router,
    "/result.txt",
    summary="The job as text, as a terminal shows it",
    responses={200: {"content": {"text/plain": {}}}, **UNFINISHED},
)
async def as_text(job_id: str, request: Request) -> Response:
    from torchstone.render import text as render

    text = await to_thread.run_sync(render, document(await _finished(request, job_id)))
    return Response(text, headers={"X-Content-Type-Options": "nosniff"}, media_type="text/plain; charset=utf-8")
