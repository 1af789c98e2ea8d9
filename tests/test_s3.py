"""A job whose artifacts lie in a bucket: stored, served, checkpointed and deleted; and a bucket that goes away."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.running import Running, running
from tests.s3 import S3, s3_server
from tests.torchstone.processes import wait_until
from torchstone.client import Client
from torchstone.store.artifacts import Blobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MLP = {"kind": "jit", "model": {"preset": "mlp"}, "calls": 50, "variants": ["eager", "trace"]}
WRITE = {"kind": "sleep", "seconds": 0, "behavior": "write", "megabytes": 100}
TRAIN = {"kind": "train", "model": {"preset": "mlp"}, "dataset": {"name": "digits"}, "strategies": ["single"]}


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3]:
    with s3_server(tmp_path) as server:
        yield server


@pytest.fixture
def up(s3: S3, tmp_path: Path) -> Iterator[Running]:
    with running(
        tmp_path / "d", TORCHSTONE_ARTIFACTS_URL=s3.url, TORCHSTONE_DIAGNOSTICS="true", **s3.environment
    ) as up:
        yield up


def test_artifacts_live_in_the_bucket_until_their_job_is_deleted(
    up: Running, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    blobs = Blobs(s3.url)
    with Client(up.url) as client:
        job = client.submit(MLP, wait_s=60)
        assert job["state"] == "succeeded", job
        rows = {row["name"]: row for row in client.artifacts(job["id"])}
        row = rows["trace.pt"]
        url = f"{up.url}/v1/jobs/{job['id']}/artifacts/trace.pt"
        whole = httpx.get(url).content
        assert hashlib.sha256(whole).hexdigest() == row["sha256"] and blobs.size(row["sha256"]) == len(whole)
        part = httpx.get(url, headers={"Range": "bytes=10-99"})
        assert (part.status_code, part.content) == (206, whole[10:100])
        assert not (tmp_path / "d" / "artifacts").exists() or not any((tmp_path / "d" / "artifacts").rglob("*"))
        trained = client.submit(TRAIN, wait_s=60)
        assert trained["state"] == "succeeded", trained
        assert httpx.get(f"{up.url}/readyz").json()["parts"]["artifacts"] == "ok"
        client.delete(job["id"])
        wait_until(lambda: blobs.size(row["sha256"]) is None, within_s=60)
        assert httpx.get(url).status_code in (404, 410)


def test_a_bucket_that_goes_away_is_told_and_the_service_goes_on(up: Running, s3: S3) -> None:
    with Client(up.url) as client:
        before = client.submit(MLP, wait_s=60)
        assert before["state"] == "succeeded", before
        large = client.submit(WRITE, wait_s=60)
        assert large["state"] == "succeeded", large
        with httpx.stream("GET", f"{up.url}/v1/jobs/{large['id']}/artifacts/bytes.bin", timeout=90) as answer:
            pieces = answer.iter_bytes(1 << 16)
            next(pieces)
            s3.stop()
            with pytest.raises(httpx.RemoteProtocolError):  # fewer bytes than were announced
                list(pieces)
        answer = httpx.get(f"{up.url}/v1/jobs/{before['id']}/artifacts/trace.pt", timeout=90)
        assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
        assert "artifact store cannot be used" in answer.json()["detail"] and "Debug" not in answer.text
        ready = httpx.get(f"{up.url}/readyz", timeout=30)
        assert ready.status_code == 503 and ready.json()["parts"]["artifacts"] != "ok"
        # A job that ends meanwhile is not lost for it: its worker tries on
        job = client.submit(MLP)
        up.wait_for_output("a file could not be stored; trying on", within_s=60)
        s3.start()
        assert client.wait(job["id"], timeout_s=90)["state"] == "succeeded"
        assert httpx.get(f"{up.url}/v1/jobs/{before['id']}/artifacts/trace.pt", timeout=90).status_code == 200
    assert "Traceback" not in up.output()
