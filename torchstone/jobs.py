"""A job's life: its states, which may follow which, and the shape that clients see.

queued -> running -> succeeded | failed | canceled
queued -> canceled | expired
running -> canceling -> canceled
running -> queued            the attempt was lost; another will be made
canceling -> succeeded | failed is NOT possible: a cancelled job never ends otherwise
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class State(StrEnum):
    """Where a job stands."""

    queued = "queued"
    running = "running"
    canceling = "canceling"
    succeeded = "succeeded"
    failed = "failed"
    canceled = "canceled"
    expired = "expired"


_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - UTC, and quicker without saying so
TRANSITIONS: dict[State, frozenset[State]] = {
    State.queued: frozenset({State.running, State.canceled, State.expired}),
    State.running: frozenset({State.succeeded, State.failed, State.canceled, State.canceling, State.queued}),
    State.canceling: frozenset({State.canceled}),
    State.succeeded: frozenset(),
    State.failed: frozenset(),
    State.canceled: frozenset(),
    State.expired: frozenset(),
}
TERMINAL: frozenset[State] = frozenset(state for state, following in TRANSITIONS.items() if not following)


def is_terminal(state: str) -> bool:
    """Whether nothing can follow `state`."""
    return State(state) in TERMINAL


class _Shape(BaseModel):
    """Built when it is first used: the service describes these and never makes one."""

    model_config = ConfigDict(defer_build=True)


class Progress(_Shape):
    """How far a running job has come: `done` of `total` in `unit`."""

    done: float = 0
    total: float | None = None
    unit: str = ""
    eta_s: float | None = None
    message: str = ""


class Receipt(_Shape):
    """The proof that a job's processes were ended, and that their memory is back."""

    reason: str = Field(description="canceled | timed_out | out_of_memory | draining | lingering")
    pids: list[int] = Field(description="Every process that was ended; none of them is left.")
    took_ms: float
    killed: bool = Field(description="Whether SIGTERM was not enough.")
    memory_back_bytes: int = Field(description="What they held of the machine's memory, and hold no more.")


class Attempt(_Shape):
    """One go at running the job, and where it ran."""

    number: int
    host: str
    devices: list[str]
    started_at: str
    finished_at: str | None = None
    outcome: str | None = Field(None, description="succeeded | failed | canceled | lost | returned")
    reason: str | None = None
    receipt: Receipt | None = Field(None, description="What it took to end its processes, where the worker had to.")


class Job(_Shape):
    """A job as GET /v1/jobs/ID shows it."""

    model_config = ConfigDict(extra="allow")

    id: str
    kind: str
    name: str | None
    labels: dict[str, str]
    state: State
    owner: str | None
    spec_version: int
    spec: dict[str, Any]
    created_at: str
    started_at: str | None
    finished_at: str | None
    progress: Progress | None
    waiting_for: dict[str, Any] | None = Field(description="Why a queued job waits: position, reason.")
    attempts: list[Attempt]
    error: dict[str, Any] | None = Field(description="code and message of a failed job")
    result: dict[str, Any] | None
    links: dict[str, str]


class JobSummary(_Shape):
    """A job in a list: without `waiting_for`, `attempts` and `result`."""

    model_config = ConfigDict(extra="allow")

    id: str
    kind: str
    name: str | None
    labels: dict[str, str]
    state: State
    owner: str | None
    spec_version: int
    spec: dict[str, Any]
    created_at: str
    started_at: str | None
    finished_at: str | None
    progress: Progress | None
    error: dict[str, Any] | None
    links: dict[str, str]


class JobList(_Shape):
    """A page of GET /v1/jobs."""

    items: list[JobSummary]
    next_cursor: str | None = Field(description="What `?cursor=` of the next page must be; null on the last one.")


def rfc3339(epoch_us: int | None) -> str | None:
    """Microseconds since 1970 as RFC 3339 UTC with microseconds, e.g. 2026-11-29T20:03:13.123456Z."""
    if epoch_us is None:
        return None
    return (_EPOCH + timedelta(microseconds=epoch_us)).isoformat(timespec="microseconds") + "Z"
