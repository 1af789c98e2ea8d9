"""The files that a job made: listed, and downloaded whole or in part.

    curl -O localhost:8000/v1/jobs/01938c5e-.../artifacts/script.pt
    curl -C - -O ...                                     # goes on where it broke off

Bytes are streamed from the store in pieces. The entity tag is the SHA-256 of the file, so it is strong, and If-Range
makes a resumed download safe. One range is answered with 206; a request for several gets the whole file, as RFC 9110
allows.
"""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from urllib.parse import quote

import structlog
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Send

from service import documents, responses
from service.openapi import shaped
from service.queries import Query
from service.routes import get, plain_router
from service.routes.jobs import find
from service.runtime import of
from torchstone.errors import NotFound, RangeNotSatisfiable, RequestError
from torchstone.store import artifacts

log = structlog.get_logger(__name__)
router = plain_router(prefix="/v1/jobs/{job_id}/artifacts", tags=["artifacts"])
_RANGE = re.compile(r"bytes=[ \t]*(\d{0,19})-(\d{0,19})[ \t]*")


@get(router, "", summary="List a job's files", responses={200: shaped("ArtifactList")})
async def listing(job_id: str, request: Request) -> Response:
    Query(request)
    runtime = of(request)
    await find(runtime, job_id)
    rows = await runtime.database.read(artifacts.all_of, job_id)
    document = {"items": [documents.artifact(row) for row in rows], "next_cursor": None}
    return responses.tagged_json(request, documents.encode(document), {})


@get(
    router,
    "/{name:path}",
    summary="Download a file",
    responses={
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The range asked for"},
        304: {"description": "The client has it already"},
        416: {"description": "The range lies outside of the file"},
    },
)
async def download(job_id: str, name: str, request: Request) -> Response:
    Query(request)
    runtime = of(request)
    await find(runtime, job_id)
    row = None if "\x00" in name else await runtime.database.read(artifacts.named, job_id, name)
    if row is None:
        raise NotFound(f"the job has no artifact {name[:200]!r}; /v1/jobs/{job_id}/artifacts lists those that it has")
    size, sha256 = int(row["bytes"]), str(row["sha256"])
    headers = {
        "ETag": f'"{sha256}"',
        "Accept-Ranges": "bytes",
        "Cache-Control": "no-cache",
        "Repr-Digest": f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:",
    }
    if responses.matches(request.headers.get("if-none-match"), headers["ETag"]):
        return Response(None, 304, headers)
    # A range is a matter of GET alone (RFC 9110, 14.2).
    part = None if request.method == "HEAD" else _part(request, size, headers["ETag"])
    start, end = part or (0, size)
    headers |= {
        "Content-Length": str(end - start),
        "Content-Type": row["media_type"],
        "Content-Disposition": _attachment(name),
        "X-Content-Type-Options": "nosniff",
    }
    if part is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    status = 200 if part is None else 206
    if request.method == "HEAD":
        return Response(None, status, headers)
    stream = runtime.blobs.stream(sha256, start, end)
    first = await anext(stream, b"")  # before anything is sent, so that lost bytes are a 410
    return _Download(_joined(first, stream), status, headers)


class _Download(StreamingResponse):
    """Is broken off where the bytes cannot be read to their end: the client sees fewer than were announced."""

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except RequestError as error:
            log.warning("a download was broken off", reason=error.detail)


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


def _part(request: Request, size: int, etag: str) -> tuple[int, int] | None:
    """[start, end) of the one range asked for; None where the whole file is the answer."""
    header = request.headers.get("range")
    match = _RANGE.fullmatch(header) if header is not None else None
    if match is None or match.group() == "bytes=-" or not (match[1] or match[2]):
        return None
    if request.headers.get("if-range", etag) != etag:
        return None
    if not match[1]:
        start, end = max(0, size - int(match[2])), size
    else:
        start, end = int(match[1]), min(size, int(match[2] or size) + 1)
        if match[2] and int(match[2]) < start:
            return None
    if start >= size or start >= end:
        raise RangeNotSatisfiable(f"the file has {size} bytes", headers={"Content-Range": f"bytes */{size}"})
    return start, end


def _attachment(name: str) -> str:
    """Content-Disposition (RFC 6266): a plain name for old clients, the true one for all others."""
    name = name.rsplit("/", 1)[-1]
    plain = re.sub(r'[^ -~]|["\\%]', "_", name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"
