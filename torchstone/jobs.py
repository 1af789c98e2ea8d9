"""A job's life: its states, and which may follow which.

queued -> running -> succeeded | failed | canceled
queued -> canceled | expired
running -> canceling -> canceled
running -> queued            the attempt was lost; another will be made
canceling -> succeeded | failed is NOT possible: a cancelled job never ends otherwise
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum


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


def rfc3339(epoch_us: int | None) -> str | None:
    """Microseconds since 1970 as RFC 3339 UTC with microseconds, e.g. 2026-11-29T20:03:13.123456Z."""
    if epoch_us is None:
        return None
    return (_EPOCH + timedelta(microseconds=epoch_us)).isoformat(timespec="microseconds") + "Z"
