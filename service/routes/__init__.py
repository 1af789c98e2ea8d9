"""The routes, one router a file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Response

Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Response]])


def get(router: APIRouter, path: str, **documented: Any) -> Callable[[Endpoint], Endpoint]:
    """Answer GET and HEAD at `path`; the server leaves the body of a HEAD out."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.add_api_route(path, endpoint, methods=["GET"], response_model=None, **documented)
        router.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
        return endpoint

    return register
