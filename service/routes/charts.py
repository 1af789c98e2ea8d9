"""A finished job's curves and timelines as pictures.

curl localhost:8000/v1/jobs/01938c5e-.../charts
curl -O localhost:8000/v1/jobs/01938c5e-.../charts/accuracy.svg

A picture is drawn when it is first asked for, in a thread, and kept in memory; its entity tag is known without drawing.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, cast, get_args

import orjson
from anyio import to_thread
from fastapi import Request, Response

from service import charts, documents, responses
from service.openapi import shaped
from service.queries import Query
from service.routes import get, plain_router
from service.routes.results import UNFINISHED, document, measured
from torchstone import __version__
from torchstone.errors import NotFound

router = plain_router(prefix="/v1/jobs/{job_id}/charts", tags=["results"])
_PICTURES = {
    media_type: {"schema": {"type": "string", "format": "binary"}} for media_type in charts.MEDIA_TYPES.values()
}


@get(router, "", summary="List a job's charts", responses={200: shaped("ChartList"), **UNFINISHED})
async def listing(job_id: str, request: Request) -> Response:
    Query(request)
    job = document(await measured(request, job_id))
    items = [
        {
            "name": chart.name,
            "title": chart.title,
            "lines": chart.lines,
            "links": {form: f"/v1/jobs/{job_id}/charts/{chart.name}.{form}" for form in charts.MEDIA_TYPES},
        }
        for chart in charts.charts_of(job)
    ]
    return responses.tagged_json(request, documents.encode({"items": items, "next_cursor": None}), {})


@get(
    router,
    "/{file}",
    summary="A chart as SVG or PNG",
    responses={200: {"content": _PICTURES}, 304: {"description": "The client has it already"}, **UNFINISHED},
)
async def picture(job_id: str, file: str, request: Request) -> Response:
    Query(request)
    row = await measured(request, job_id)
    name, _, form = file.rpartition(".")
    job = document(row)
    if form not in get_args(charts.Format) or charts.find(job, name) is None:
        known = ", ".join(chart.name for chart in charts.charts_of(job)) or "none"
        raise NotFound(f"the job has no chart {file[:80]!r}; as .svg and .png it has: {known}")
    key = orjson.dumps([__version__, file, row["spec"], row["name"], row["attempts"], row["result"]])
    tag = hashlib.blake2b(key, digest_size=12).hexdigest()
    headers = {
        "ETag": f'"{tag}"',
        "Cache-Control": "no-cache",
        "Content-Disposition": f'inline; filename="{file}"',
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox",
        "X-Content-Type-Options": "nosniff",
    }
    if responses.matches(request.headers.get("if-none-match"), headers["ETag"]):
        return Response(None, 304, headers)
    drawn = await to_thread.run_sync(_drawn, _Once(tag, job, name, cast(charts.Format, form)))
    return Response(drawn, headers=headers, media_type=charts.MEDIA_TYPES[cast(charts.Format, form)])


class _Once:
    """A picture to draw, equal to another of the same tag: so that the cache need not hash a whole job."""

    def __init__(self, tag: str, job: dict[str, Any], name: str, form: charts.Format) -> None:
        self.tag, self.form = tag, form
        self.chart = charts.find(job, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Once) and other.tag == self.tag

    def __hash__(self) -> int:
        return hash(self.tag)


@lru_cache(64)
def _drawn(wanted: _Once) -> bytes:
    assert wanted.chart is not None
    return charts.draw(wanted.chart, wanted.form)
