"""The OpenAPI description: real specs as examples, the shapes of answers, and problem documents everywhere.

Models stand here for the description only: the answers themselves are bytes that the store had as JSON text.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from service.problems import MEDIA_TYPE
from torchstone.jobs import State
from torchstone.specs import EXAMPLES, KINDS, Spec

Json = dict[str, Any]
_REFERENCE = "#/components/schemas/{model}"


class Fault(BaseModel):
    """One fault of a request."""

    pointer: str = Field(description="A JSON pointer (RFC 6901) into the body, or ?name for a query parameter.")
    detail: str


class Problem(BaseModel):
    """Why a request was not answered with what it asked for (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[Fault] = Field(default_factory=list)
    instance: str


class ArtifactItem(BaseModel):
    """A file that a job made."""

    name: str
    media_type: str
    bytes: int
    sha256: str
    created_at: str
    href: str


class ArtifactList(BaseModel):
    """The files of a job."""

    items: list[ArtifactItem]
    next_cursor: None = None


class Device(BaseModel):
    """A device of a host, and which job holds it."""

    model_config = ConfigDict(extra="allow")

    name: str
    type: str
    held_by: Json | None


class HostItem(BaseModel):
    """A worker host."""

    name: str
    machine: str
    state: str = Field(description="up | draining | down | lost")
    registered_at: str
    seen_at: str
    memory_bytes: int = Field(description="What a job may take.")
    isolated_by: str | None = Field(description="The job that has the machine to itself.")
    devices: list[Device]
    info: Json


class HostList(BaseModel):
    """Every host that registered."""

    items: list[HostItem]
    next_cursor: None = None


class Kind(BaseModel):
    """A kind of experiment."""

    model_config = ConfigDict(protected_namespaces=())

    kind: str
    summary: str
    example: Json = Field(description="A spec that can be submitted as it stands.")
    json_schema: Json = Field(alias="schema")


class KindList(BaseModel):
    """Every kind of experiment."""

    items: list[Kind]
    next_cursor: None = None


class Readiness(BaseModel):
    """ready, or which part is not."""

    status: str
    parts: dict[str, str]


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
    description = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    schemas = description["components"]["schemas"]
    spec = TypeAdapter(Spec).json_schema(ref_template=_REFERENCE)
    schemas.update(spec.pop("$defs", {}))
    schemas["Spec"] = spec
    problem = Problem.model_json_schema(ref_template=_REFERENCE)
    schemas.update(problem.pop("$defs", {}))
    schemas["Problem"] = problem
    told = {"description": "A problem", "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    for operations in description["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own shape, which is never sent
            operation["responses"]["4XX"] = told
            operation["responses"].setdefault("503", told)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return description
