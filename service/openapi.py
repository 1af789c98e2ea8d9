"""The OpenAPI description: real specs as examples, the shapes of answers, and problem documents everywhere.

    @router.get("/kinds", responses={200: shaped("KindList")})

Routes name shapes by their name only: the models (service.shapes) are built when the description is first asked for.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from service.problems import MEDIA_TYPE
from torchstone.jobs import State
from torchstone.specs import EXAMPLES, KINDS, Spec

Json = dict[str, Any]
_REFERENCE = "#/components/schemas/{model}"


def shaped(name: str, description: str = "OK", **more: Any) -> Json:
    """A response whose body has the shape of a model in service.shapes, by its name."""
    schema = {"$ref": _REFERENCE.format(model=name)}
    return {"description": description, "content": {"application/json": {"schema": schema}}, **more}


def _query(name: str, description: str, schema: Json, **more: Any) -> Json:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema, **more}


def _header(name: str, description: str, example: str) -> Json:
    text = {"type": "string"}
    return {"name": name, "in": "header", "required": False, "description": description, "schema": text} | (
        {"example": example} if example else {}
    )


_SECONDS = {"type": "number", "minimum": 0}
_PREFER = _header("Prefer", "wait=SECONDS: answer once the job is finished, or after this time (RFC 7240).", "wait=30")

VALIDATE_ONLY = [
    _query("validate_only", "Check the spec and say where it would run; store nothing.", {"type": "boolean"}),
    _PREFER,
    _header("Idempotency-Key", "The same key and spec give the same job; another spec is refused with 422.", "run-42"),
]
WAIT = [
    _query("wait", "Answer once the job is finished, or after this many seconds.", _SECONDS, example=30),
    _PREFER,
    _header("If-None-Match", "The ETag of an earlier answer: 304 if nothing changed.", ""),
]
LIST_PARAMETERS = [
    _query("state", "Only jobs in this state; may be repeated.", {"type": "array", "items": {"enum": list(State)}}),
    _query("kind", "Only jobs of this kind.", {"type": "string", "enum": list(KINDS)}),
    _query("label", "KEY:VALUE: only jobs with this label.", {"type": "string"}, example="team:vision"),
    _query("limit", "Most jobs on a page.", {"type": "integer", "minimum": 1, "maximum": 500, "default": 50}),
    _query("cursor", "next_cursor of the page before, with the same filters.", {"type": "string"}),
]
EVENT_PARAMETERS = [_header("Last-Event-ID", "Go on after this event.", "17")]
LOG_PARAMETERS = [
    _query("attempt", "Only this attempt; else all in order.", {"type": "integer", "minimum": 1}),
    _query("follow", "Stay until the job is over.", {"type": "boolean"}),
]
SUBMIT: Json = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/Spec"},
            "examples": {kind: {"value": example} for kind, example in EXAMPLES.items()},
        }
    },
}
CREATED: Json = {
    "Location": {"description": "The path of the job", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds", "schema": {"type": "string"}},
    "Preference-Applied": {"description": "The wait that was honoured", "schema": {"type": "string"}},
}


def install(app: FastAPI) -> None:
    """Make `app` describe itself so; the description is built when it is first asked for."""

    def describe() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _describe(app: FastAPI) -> Json:
    from service.shapes import SHAPES

    description = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    spec = TypeAdapter(Spec).json_schema(ref_template=_REFERENCE)
    shapes = models_json_schema([(shape, "serialization") for shape in SHAPES], ref_template=_REFERENCE)[1]["$defs"]
    description["components"] = {"schemas": {**spec.pop("$defs", {}), **shapes, "Spec": spec}}
    told = {"description": "A problem", "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    for operations in description["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own shape, which is never sent
            operation["responses"]["4XX"] = told
            operation["responses"].setdefault("503", told)
    return description
