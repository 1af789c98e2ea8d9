"""Reading what a client sends: limited in size, strict JSON, and forgiving about one header.

    spec = parse_spec(decode(await read(request, settings.max_body_bytes)))

`curl -d` says `application/x-www-form-urlencoded` unless told otherwise, so a JSON body under that name is taken as
well; not from a browser, where any page may send such a form to a service on this machine. A key that stands twice in
an object is refused, since which of the two was meant cannot be known. NaN and Infinity are not JSON.
"""

from __future__ import annotations

import json
from typing import Any

import orjson
from fastapi import Request

from torchstone.errors import BadRequest, TooLarge, UnsupportedMediaType

_FORM = "application/x-www-form-urlencoded"


async def read(request: Request, max_bytes: int) -> bytes:
    """The body. Raises TooLarge as soon as it is known to be over `max_bytes`; no more of it is ever in memory."""
    _check_content_type(request)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def decode(body: bytes) -> Any:
    """The JSON value that `body` is. Raises BadRequest with a sentence that says what is wrong with it."""
    try:
        value = orjson.loads(body)
        json.loads(body, object_pairs_hook=_refuse_twice)
    except orjson.JSONDecodeError as error:
        raise BadRequest(_why(body, error)) from None
    except RecursionError:
        raise BadRequest("the body is not acceptable JSON: it is nested too deeply") from None
    return value


def _check_content_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == _FORM and "origin" in request.headers:
        raise UnsupportedMediaType("a web page must send its JSON as Content-Type: application/json")
    if media_type not in ("", "application/json", _FORM) and not media_type.endswith("+json"):
        raise UnsupportedMediaType(f"send JSON as Content-Type: application/json, not {media_type[:80]!r}")


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is over {max_bytes} bytes, the most that is taken", headers={"Connection": "close"})


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRequest(f"the key {key[:80]!r} stands twice in one object of the body")
            seen.add(key)


def _why(body: bytes, error: orjson.JSONDecodeError) -> str:
    if not body.strip():
        return "the body is empty; a spec as JSON is needed"
    if body[error.pos :].lstrip(b"-").startswith((b"NaN", b"Infinity", b"nan", b"inf")):
        return f"the body is not JSON: NaN and Infinity are no JSON numbers (line {error.lineno}, column {error.colno})"
    return f"the body is not acceptable JSON: {error}"
