"""What is recorded of an attempt that has ended, put together from what its process and the artifact store said."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson

from torchstone.errors import ArtifactFailed
from torchstone.jobs import State
from torchstone.results import dumps
from worker.launch import Outcome


def without_files(state: State, error: dict[str, Any] | None, why: str) -> tuple[State, dict[str, Any] | None]:
    """What an attempt ends as whose files cannot be stored: what went wrong before that comes first."""
    if state is State.succeeded:
        return State.failed, {"code": ArtifactFailed.code, "message": why}
    return state, error and {**error, "message": f"{error['message']} (and {why})"}


def receipt_of(outcome: Outcome) -> dict[str, Any] | None:
    """What it took to end the job's processes (`torchstone.jobs.Receipt`); None where it ended by itself."""
    if outcome.stopped is None:
        return None
    receipt = dataclasses.asdict(outcome.receipt)
    del receipt["survivors"]  # there are none
    return {"reason": outcome.stopped, **receipt}


def completed(result: str, files: list[dict[str, Any]], neighbours: list[dict[str, Any]]) -> str:
    """The result with what the job itself cannot know.

    That is its `artifacts` as they were stored (what the job said of its files is not believed) and the jobs that ran
    beside it on this host, which make a measurement suspect.
    """
    document = orjson.loads(result)
    document["artifacts"] = files
    if neighbours:
        for host in document["environment"].get("hosts", [])[:1]:
            host["neighbours"] = neighbours
        quality = document["quality"]
        quality["codes"].append({"code": "neighbours", "severity": "warning", "evidence": {"jobs": neighbours}})
        quality["grade"] = "suspect" if quality["grade"] == "valid" else quality["grade"]
    return dumps(document)
