"""The routes, one router a file.

Endpoints read their own queries and bodies and write their own responses; FastAPI finds them and describes them. What
it would do in between (dependencies, parameters, models) is a third of the time of a small answer, so `PlainRoute`
leaves it out.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Response]])


class PlainRoute(APIRoute):
    """Calls its endpoint with the names in the path, as strings, and with `request` if it takes that."""

    def get_route_handler(self) -> Handler:
        """What answers a request."""
        return _handler(self.endpoint)


def plain_router(**options: Any) -> APIRouter:
    """A router of such routes."""
    return APIRouter(route_class=PlainRoute, **options)


def get(router: APIRouter, path: str, **documented: Any) -> Callable[[Endpoint], Endpoint]:
    """Answer GET and HEAD at `path`; the server leaves the body of a HEAD out."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.add_api_route(path, endpoint, methods=["GET"], response_model=None, **documented)
        described, handle = router.routes[-1], _handler(endpoint)

        async def handle_head(request: Request) -> Response:
            request.scope["route"] = described  # requests are counted by it, and FastAPI notes only its own kind
            return await handle(request)

        router.add_route(router.prefix + path, handle_head, methods=["HEAD"], include_in_schema=False)
        return endpoint

    return register


def _handler(endpoint: Callable[..., Awaitable[Response]]) -> Handler:
    takes_request = "request" in inspect.signature(endpoint).parameters

    async def handle(request: Request) -> Response:
        named = {**request.path_params, "request": request} if takes_request else request.path_params
        return await endpoint(**named)

    return handle
