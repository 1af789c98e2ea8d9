"""An `async` job over HTTP: from the spec to the table, the charts and the script that repeats it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.running import running
from torchstone.client import Client

pytestmark = pytest.mark.slow
SPEC = {"kind": "async", "name": "who waits", "size": 64, "repeats": 4, "devices": {"count": 2}, "budget_s": 1.5}


def test_an_async_job_end_to_end(tmp_path: Path) -> None:
    with running(tmp_path / "data") as up, Client(up.url) as client:
        job = client.wait(client.submit(SPEC)["id"], timeout_s=90)
        assert job["state"] == "succeeded", job["error"]
        result, url = job["result"], f"{up.url}/v1/jobs/{job['id']}"
        assert result["skipped"] == []
        assert {t["name"] for t in result["timings"]} == {
            "numpy_vs_torch", "dispatch", "completion", "feeding", "barriers", "graph", "noise",
        }  # fmt: skip
        assert {"dispatch", "completion", "queue_depth", "barrier", "overlap"} <= {f["name"] for f in result["figures"]}
        assert not [code for code in result["quality"]["codes"] if code["code"] in ("wrong_result", "mode_mismatch")]
        assert [c["name"] for c in result["checks"] if not c["passed"]] == []
        assert {a["name"] for a in result["artifacts"]} == {"reproduce.py", "samples.npz"}

        text = httpx.get(f"{url}/result.txt").text
        for words in ("operations on a CPU device are synchronous", "not equal work", "[[3, 3]]", "findings"):
            assert words in text
        listed = httpx.get(f"{url}/charts").json()["items"]
        assert [item["name"] for item in listed] == ["time_per_operation", "timeline_feeding", "timeline_graph"]
        for item in listed:
            picture = httpx.get(up.url + item["links"]["svg"], timeout=30)
            assert picture.status_code == 200 and picture.content.startswith(b"<svg")
        one_too_many = httpx.post(f"{up.url}/v1/jobs", json={**SPEC, "size": 60_000, "parts": ["numpy_vs_torch"]})
        assert one_too_many.status_code == 422, "no host has the memory"
