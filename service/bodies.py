"""Reading what a client sends: limited in size, strict JSON, and forgiving about one header.

    spec = parse_spec(decode(await read(request, settings.max_body_bytes)))

`curl -d` says `application/x-www-form-urlencoded` unless told otherwise, so a JSON body under that name is taken as
well; not from a browser, where any page may send such a form to a service on this machine. A key that stands twice in
an object is refused, since which of the two was meant cannot be known. NaN and 1e999 are refused with pointers.
"""

from __future__ import annotations

import json
import math
from typing import Any

import orjson
from fastapi import Request

from torchstone.errors import BadRequest, FieldError, InvalidRequest, TooLarge, UnsupportedMediaType

_MOST_FAULTS = 20
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
    """The JSON value that `body` is.

    Raises BadRequest with a sentence that says what is wrong with it, or InvalidRequest with pointers where numbers are
    NaN, infinite or too large for a double: not JSON either, but many a client writes them.
    """
    try:
        value = orjson.loads(body)
        json.loads(body, object_pairs_hook=_refuse_twice)
    except orjson.JSONDecodeError as error:
        _refuse_no_numbers(body)
        raise BadRequest(_why(body, error)) from None
    except RecursionError:
        raise BadRequest("the body is not acceptable JSON: it is nested too deeply") from None
    return value


def _check_content_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(f"send the body as it is: Content-Encoding {encoding[:80]!r} is not taken")
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


def _refuse_no_numbers(body: bytes) -> None:
    """Raises InvalidRequest where `body` is JSON but for numbers that are none."""
    try:
        todo: list[tuple[str, Any]] = [("", json.loads(body.decode()))]
    except (ValueError, RecursionError):
        return
    faults: list[FieldError] = []
    while todo:
        pointer, value = todo.pop()
        if isinstance(value, float) and not math.isfinite(value):
            faults.append({"pointer": pointer, "detail": "must be a finite number: JSON has no NaN and no Infinity"})
        rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        todo += [(f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}", item) for key, item in rows]
    if faults:
        faults.sort(key=lambda fault: fault["pointer"])
        raise InvalidRequest(
            f"{faults[0]['pointer'] or 'the body'}: {faults[0]['detail']}", errors=faults[:_MOST_FAULTS]
        )


def _why(body: bytes, error: orjson.JSONDecodeError) -> str:
    if not body.strip():
        return "the body is empty; a spec as JSON is needed"
    return f"the body is not acceptable JSON: {error}"
