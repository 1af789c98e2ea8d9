"""Every error as application/problem+json (RFC 9457), with one pointer and sentence for each fault.

    HTTP/1.1 422
    {"type": "about:blank", "title": "Invalid request", "status": 422, "detail": "/model/presett: unknown field",
     "errors": [{"pointer": "/model/presett", "detail": "unknown field"}], "instance": "/v1/jobs"}

A pointer is an RFC 6901 JSON pointer into the body; `?name` points at a query parameter.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import orjson
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchstone.errors import FieldError, InvalidRequest, RequestError, Unavailable
from torchstone.store import is_transient

MEDIA_TYPE = "application/problem+json"
_LINGER_S = 2.0
_LINGER_BYTES = 64 << 20

log = structlog.get_logger(__name__)


def install(app: FastAPI) -> None:
    """Answer every error of `app` with a problem document."""
    app.add_exception_handler(RequestError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(SQLAlchemyError, _on_error)
    app.add_middleware(_Unexpected)


def problem(error: RequestError, path: str) -> Response:
    """The response that tells `error`."""
    return _response(error.status, error.title, error.detail, path, error.errors, error.headers)


def _response(
    status: int, title: str, detail: str, path: str, errors: list[FieldError], headers: dict[str, str]
) -> Response:
    body: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    if errors:
        body["errors"] = errors
    body["instance"] = path
    kind = _Lingering if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else Response
    return kind(orjson.dumps(body), status, {**headers, "Cache-Control": "no-store"}, MEDIA_TYPE)


def _as_request_error(error: Exception) -> RequestError:
    """What a client is told of `error`: nothing of its inside, unless it was meant for clients."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, SQLAlchemyError) and is_transient(error):
        log.warning("the database is out of reach", error=str(getattr(error, "orig", error)))
        return Unavailable("the database is out of reach, busy or full; the same request may succeed in a moment")
    return RequestError("an error of the service itself; its log tells more")


async def _on_error(request: Request, error: Exception) -> Response:
    told = _as_request_error(error)
    if told.status >= 500 and not isinstance(told, Unavailable):
        log.error("request failed", method=request.method, path=request.url.path, exc_info=error)
    return problem(told, request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    status = HTTPStatus(error.status_code)
    detail = str(error.detail)
    if status == HTTPStatus.NOT_FOUND:
        detail = f"there is nothing at {path}; the routes are listed in /openapi.json"
    headers = dict(error.headers or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method} is not possible at {path}"
        headers["Allow"] = ", ".join(_allowed(request))
    return _response(status, status.phrase, detail, path, [], headers)


def _allowed(request: Request) -> list[str]:
    """The methods of all routes at this path: the router itself names those of the first alone."""
    found: set[str] = set()
    for route in [*request.app.routes, *request.app.state.endpoints]:
        if route.matches(request.scope)[0] != Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return sorted(found)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults: list[FieldError] = [
        {"pointer": f"?{fault['loc'][-1]}", "detail": str(fault["msg"])} for fault in error.errors()
    ]
    return problem(InvalidRequest("a parameter is not acceptable", errors=faults), request.url.path)


class _Lingering(Response):
    """Answers at once, then lets go of what the client is still sending: to close the connection right away would
    reset it, and with it the answer that the client has not read yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if (b"expect", b"100-continue") not in scope["headers"]:  # such a client sends nothing before it is asked to
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    await _discard(receive)
        await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    discarded = 0
    while discarded < _LINGER_BYTES:
        message = await receive()
        discarded += len(message.get("body", b""))
        if not message.get("more_body"):
            return


class _Unexpected:
    """The last resort: whatever nobody foresaw is logged with its traceback and answered without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            log.exception("request failed", method=scope["method"], path=scope["path"])
            if started:
                raise  # half an answer is out: only cutting the connection tells the client
            await problem(_as_request_error(error), scope["path"])(scope, receive, send)
