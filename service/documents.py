"""Rows of the store as the JSON documents that clients see, as bytes.

    body = encode(job(row, waiting_for))

Specs, results, labels, progress and errors lie in the store as JSON text and are passed through unparsed. Links are
paths, so that they hold behind any proxy and under any name of the service.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import orjson

from torchstone.jobs import rfc3339

Json = dict[str, Any]


def encode(document: Any) -> bytes:
    """`document` as JSON; what the store had as text goes out as it is."""
    return orjson.dumps(document)


def job(row: Json, waiting_for: Json | None) -> Json:
    """The whole job, as torchstone.jobs.Job describes it."""
    return {
        **summary(row),
        "waiting_for": waiting_for,
        "attempts": row["attempts"],
        "result": _raw(row["result"]),
    }


def summary(row: Json) -> Json:
    """A job in a list: everything but `waiting_for`, `attempts` and `result`."""
    job_id = row["id"]
    path = f"/v1/jobs/{job_id}"
    return {
        "id": job_id,
        "kind": row["kind"],
        "name": row["name"],
        "labels": _raw(row["labels"]),
        "state": row["state"],
        "owner": row["owner"],
        "spec_version": row["spec_version"],
        "spec": _raw(row["spec"]),
        "created_at": rfc3339(row["created_us"]),
        "started_at": rfc3339(row["started_us"]),
        "finished_at": rfc3339(row["finished_us"]),
        "progress": _raw(row["progress"]),
        "error": _raw(row["error"]),
        "links": {
            "self": path,
            "cancel": f"{path}/cancel",
            "events": f"{path}/events",
            "logs": f"{path}/logs",
            "result": f"{path}/result.json",
            "artifacts": f"{path}/artifacts",
            "charts": f"{path}/charts",
        },
    }


def artifact(row: Json) -> Json:
    """One file that a job made, and where its bytes are."""
    return {
        "name": row["name"],
        "media_type": row["media_type"],
        "bytes": row["bytes"],
        "sha256": row["sha256"],
        "created_at": rfc3339(row["created_us"]),
        "href": f"/v1/jobs/{row['job_id']}/artifacts/{quote(row['name'])}",
    }


def _raw(text: str | None) -> orjson.Fragment | None:
    return None if text is None else orjson.Fragment(text)
