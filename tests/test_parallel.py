"""A `parallel` job from POST to table, through `torchstone up` with two CPU devices."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.running import running
from torchstone.client import Client

pytestmark = pytest.mark.slow

SPEC = {"kind": "parallel", "size": 128, "repeats": 8, "devices": {"type": "cpu", "count": 2}, "budget_s": 3}


def test_two_devices_at_once_over_http(tmp_path: Path) -> None:
    with running(tmp_path / "d", TORCHSTONE_CPU_DEVICES="2") as up, Client(up.url) as client:
        refused = httpx.post(f"{up.url}/v1/jobs", json={"kind": "parallel", "devices": {"type": "cpu", "count": 1}})
        assert refused.status_code == 422
        assert [e["pointer"] for e in refused.json()["errors"]] == ["/devices/count"]
        assert "two devices are needed" in refused.json()["detail"]

        job = client.wait(client.submit(SPEC)["id"], timeout_s=100)
        assert job["state"] == "succeeded", job["error"]
        result = job["result"]
        figures = {(f["name"], f["of"]): f for f in result["figures"]}
        assert figures["scaling_efficiency", "concurrent"]["value"] > 0
        assert figures["overlap", "pinned"]["value"] is None and figures["overlap", "pinned"]["reason"]
        hidden = figures["host_copy_overlap", "overlapped"]
        assert (hidden["value"] is None) != (hidden["reason"] is None)
        assert {t["name"] for t in result["timings"]} == {"compute", "copy", "both", "noise"}
        assert {s["at"]["rank"] for s in result["spans"] if s["of"] == "concurrent"} == {0, 1}
        assert all(check["passed"] for check in result["checks"])
        assert {a["name"] for a in result["artifacts"]} == {"reproduce.py", "samples.npz"}
        charts = httpx.get(f"{up.url}/v1/jobs/{job['id']}/charts").json()["items"]
        assert [c["name"] for c in charts] == [
            "compute_rate",
            "speedup",
            "timeline_concurrency",
            "timeline_overlap",
            "timeline_schedule",
        ]
        rate = httpx.get(f"{up.url}/v1/jobs/{job['id']}/charts/compute_rate.svg")
        assert rate.status_code == 200 and "Compute rate by devices" in rate.text
        table = httpx.get(f"{up.url}/v1/jobs/{job['id']}/result.txt").text
        for words in ("concurrent", "host_copy_overlap", "by_hand", "first start", "cpu:0, cpu:1"):
            assert words in table
