"""The shapes of the answers, for the OpenAPI description alone: loaded when that is first asked for.

The answers themselves are bytes that the store had as JSON text; nothing is validated on its way out.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from torchstone.jobs import State
from torchstone.results import Result

Json = dict[str, Any]


class Progress(BaseModel):
    """How far a running job has come: `done` of `total` in `unit`."""

    done: float = 0
    total: float | None = None
    unit: str = ""
    eta_s: float | None = None
    message: str = ""


class Receipt(BaseModel):
    """The proof that a job's processes were ended, and that their memory is back."""

    reason: str = Field(description="canceled | timed_out | out_of_memory | draining | lingering")
    pids: list[int] = Field(description="Every process that was ended; none of them is left.")
    took_ms: float
    killed: bool = Field(description="Whether SIGTERM was not enough.")
    memory_back_bytes: int = Field(description="What they held of the machine's memory, and hold no more.")


class Attempt(BaseModel):
    """One go at running the job, and where it ran."""

    number: int
    host: str
    devices: list[str]
    started_at: str
    finished_at: str | None = None
    outcome: str | None = Field(None, description="succeeded | failed | canceled | lost | returned")
    reason: str | None = None
    receipt: Receipt | None = Field(None, description="What it took to end its processes, where the worker had to.")


class JobSummary(BaseModel):
    """A job in a list: without `waiting_for`, `attempts` and `result`."""

    model_config = ConfigDict(extra="allow")

    id: str
    kind: str
    name: str | None
    labels: dict[str, str]
    state: State
    owner: str | None
    spec_version: int
    spec: Json
    created_at: str
    started_at: str | None
    finished_at: str | None
    progress: Progress | None
    error: Json | None = Field(description="code and message of a failed job")
    links: dict[str, str]


class Job(JobSummary):
    """A job as GET /v1/jobs/ID shows it."""

    waiting_for: Json | None = Field(description="Why a queued job waits: position, reason.")
    attempts: list[Attempt]
    result: Json | None


class JobList(BaseModel):
    """A page of GET /v1/jobs."""

    items: list[JobSummary]
    next_cursor: str | None = Field(description="What `?cursor=` of the next page must be; null on the last one.")


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


class ChartItem(BaseModel):
    """A picture of a job's curves, or of its timeline."""

    name: str
    title: str
    lines: int = Field(description="How many curves it shows, or rows of a timeline.")
    links: dict[str, str] = Field(description="svg and png")


class ChartList(BaseModel):
    """The pictures of a job's curves and timelines."""

    items: list[ChartItem]
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


class Ceiling(BaseModel):
    """A rate that a `hardware` job found, and which job that was."""

    model_config = ConfigDict(extra="allow")

    name: str
    of: str = Field(description="The probe.")
    at: Json
    value: float
    unit: str = Field(description="B/s | FLOP/s")
    job: str
    finished_at: str | None
    grade: str = Field(description="valid | suspect")


class HostCeilings(BaseModel):
    """What a host can reach: each probe as the newest report has it that ran it and is not invalid."""

    host: str
    job: str = Field(description="The newest report.")
    finished_at: str | None
    grade: str
    ceilings: list[Ceiling]


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


class Checked(BaseModel):
    """A spec that was checked and not stored."""

    spec: Json = Field(description="With every default filled in.")
    would_run: Json = Field(
        description="device_type, device_count, hosts, alone_on_its_machine, and memory_bytes: the least that it takes"
    )
    warnings: list[str]


SHAPES: tuple[type[BaseModel], ...] = (
    Job,
    JobList,
    Result,
    Problem,
    ArtifactList,
    ChartList,
    HostList,
    HostCeilings,
    KindList,
    Readiness,
    Checked,
)
