"""JSON answers, with strong entity tags and what follows from them."""

from __future__ import annotations

import hashlib

from fastapi import Request, Response

JSON = "application/json"


def json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON body that is not to be kept."""
    return Response(body, status, {"Cache-Control": "no-store", **(headers or {})}, JSON)


def tagged_json(request: Request, body: bytes, headers: dict[str, str]) -> Response:
    """A JSON body under its own hash as entity tag; 304 where the client has it already."""
    headers = {"ETag": f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"', "Cache-Control": "no-cache", **headers}
    if matches(request.headers.get("if-none-match"), headers["ETag"]):
        return Response(None, 304, headers)
    return Response(body, 200, headers, JSON)


def matches(if_none_match: str | None, etag: str) -> bool:
    """Whether an If-None-Match header names `etag` (weak comparison, RFC 9110 13.1.2)."""
    if if_none_match is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags
