"""Whether the process lives (`/healthz`), whether it can do its work (`/readyz`), and in figures how (`/metrics`).

`/readyz` is 503 while the database, its schema, the broker or the artifact store is not as it must be, or this process
is stopping or has lost a part, and says which. Jobs are accepted without a broker: workers then find them a little
later, by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool

from service import documents, responses
from service.openapi import shaped
from service.routes import get, plain_router
from service.runtime import Runtime, of
from torchstone.store import require_current_schema

router = plain_router(tags=["health"])
_WITHIN_S = 5.0


@get(router, "/healthz", summary="Whether the process lives")
async def healthz() -> Response:
    return responses.json(b'{"status":"ok"}')


@get(
    router,
    "/readyz",
    summary="Whether everything it needs is within reach",
    responses={200: shaped("Readiness", "Ready"), 503: shaped("Readiness", "Not ready")},
)
async def readyz(request: Request) -> Response:
    runtime = of(request)
    checks = _checks(runtime)
    answers = await asyncio.gather(*(_answer(check) for check in checks.values()))
    parts = dict(zip(checks, answers, strict=True))
    ready = all(answer == "ok" for answer in answers)
    body = documents.encode({"status": "ready" if ready else "not ready", "parts": parts})
    return responses.json(body, 200 if ready else 503, {} if ready else {"Retry-After": "2"})


def _checks(runtime: Runtime) -> dict[str, Callable[[], object]]:
    """What must not raise, nor return False."""
    return {
        "database": lambda: require_current_schema(runtime.database.store),
        "broker": runtime.bell.answers,
        "artifacts": runtime.blobs.reachable,
        "service": lambda: _at_work(runtime),
    }


def _at_work(runtime: Runtime) -> None:
    """Raise where this process itself should get no more requests."""
    if runtime.stopping:
        raise RuntimeError("this process is about to stop")
    ended = [task.get_name() for task in runtime.tasks if task.done()]
    if ended:
        raise RuntimeError(f"parts of this process have ended: {', '.join(ended)}; its log tells why")
    if runtime.writer.held_up_s > _WITHIN_S:
        raise RuntimeError(f"the database has not taken new jobs for {runtime.writer.held_up_s:.0f} s")


async def _answer(check: Callable[[], object]) -> str:
    """ok, or what is wrong in a line."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            return "out of reach" if await run_in_threadpool(check) is False else "ok"
    except TimeoutError:
        return f"no answer within {_WITHIN_S:g} s"
    except Exception as error:  # whatever the part raises is what is to be told
        return str(getattr(error, "orig", None) or error).strip().partition("\n")[0][:300] or type(error).__name__


@get(
    router,
    "/metrics",
    summary="Figures for Prometheus",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    body, media_type = await of(request).metrics.render()
    return Response(body, 200, {"Cache-Control": "no-store"}, media_type)
