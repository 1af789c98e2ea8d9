"""The FastAPI application: `create_app(settings)` joins the routes, the errors and what lives as long as the process.

uvicorn.run(create_app(Settings()))
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter

import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import openapi, problems
from service.metrics import CountRequests
from service.routes import artifacts, charts, health, inventory, jobs, results, watching
from service.runtime import running
from torchstone import __version__
from torchstone.settings import Settings

log = structlog.get_logger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """The service; its store, bell and background tasks start with its lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings) as runtime:
            app.state.runtime = runtime
            yield

    app = FastAPI(
        title="Torchstone",
        version=__version__,
        summary="Deep-learning performance experiments as jobs.",
        lifespan=lifespan,
        redirect_slashes=False,
    )
    parts = (jobs, results, charts, artifacts, watching, inventory, health)
    for part in parts:
        app.include_router(part.router)
    app.state.endpoints = [route for part in parts for route in part.router.routes]
    problems.install(app)
    openapi.install(app)
    app.add_middleware(CountRequests)
    if settings.log_level == "debug":
        app.add_middleware(_LogRequests)
    return app


class _LogRequests:
    """One line for each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_s, status = perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            took_ms = round((perf_counter() - begin_s) * 1e3, 2)
            job = {"job_id": scope["path"].split("/")[3]} if scope["path"].startswith("/v1/jobs/") else {}
            log.debug("request", method=scope["method"], path=scope["path"], status=status, took_ms=took_ms, **job)
