"""The client and its commands against the real service. The worker is the store's own functions: no torch is needed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.torchstone.processes import VARIABLE, marked, wait_until
from tests.torchstone.sample_jobs import full_result
from torchstone import errors, render
from torchstone.client import Client
from torchstone.jobs import State
from torchstone.settings import Settings
from torchstone.store import Store, claims, hosts, leases, logs, migrate
from torchstone.store.artifacts import Blobs

SPEC = {"kind": "jit", "model": {"preset": "mlp"}, "labels": {"team": "vision"}}
BYTES = os.urandom(3 << 20)


@dataclass
class Service:
    """A running API, and a worker host that does what a test tells it."""

    settings: Settings
    store: Store
    host: hosts.Host

    @property
    def url(self) -> str:
        return self.settings.public_url

    def claim(self) -> claims.Claim:
        with self.store.write() as conn:
            claim = claims.claim(conn, self.host, 30)
        assert claim is not None
        return claim

    def finish(self, folder: Path, files: dict[str, bytes] | None = None) -> claims.Claim:
        """Run the next job: it prints a line, finds `full_result` and makes `files`."""
        claim = self.claim()
        blobs = Blobs(self.settings.artifacts_url)
        rows = []
        for name, data in (files or {}).items():
            path = folder / "made"
            path.write_bytes(data)
            sha256, size = blobs.put(path)
            rows.append({"name": name, "media_type": "application/octet-stream", "bytes": size, "sha256": sha256})
        with self.store.write() as conn:
            logs.append(conn, claim.holder.job_id, claim.holder.attempt, [(0, "measuring\n")])
            leases.finish(conn, claim.holder, State.succeeded, result=full_result().to_json(), files=rows)
        return claim


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    data = tmp_path_factory.mktemp("service")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Nothing listens at the broker's URL: a job is stored and answered all the same.
    settings = Settings(data=data, port=port)
    migrate(settings.database_url)
    store = Store(settings.database_url)
    host = hosts.Host("a", "machine", uuid.uuid4().hex, os.getpid(), 0.0, [_device("cpu:0")], 1 << 34, {})
    with store.write() as conn:
        hosts.register(conn, host)
    with marked() as mark, (data / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "service"],
            env={**mark.environment, **settings.environment()},
            stdout=log,
            stderr=log,
        )
        wait_until(lambda: _answers(settings.public_url), 20, lambda: (data / "log").read_text())
        yield Service(settings, store, host)
        process.terminate()
        process.wait(20)
        mark.wait_until_gone(within_s=2)
    store.dispose()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.url) as client:
        yield client


@pytest.fixture
def finished(service: Service, client: Client, tmp_path: Path) -> dict[str, Any]:
    """A job that succeeded, with one artifact of 3 MiB."""
    job = client.submit(SPEC)
    service.finish(tmp_path, {"script.pt": BYTES})
    return client.job(job["id"])


def test_submit_wait_and_read(service: Service, client: Client, tmp_path: Path) -> None:
    job = client.submit(SPEC)
    assert job["state"] == "queued"
    seen = []

    def on_progress(job: dict[str, Any]) -> None:
        if not seen:
            service.finish(tmp_path)
        seen.append(job["state"])

    done = client.wait(job["id"], on_progress, timeout_s=30)
    assert seen[0] == "queued"
    assert seen[-1] == done["state"] == "succeeded"
    assert done["result"]["timings"][0]["of"] == "eager"
    assert "".join(client.logs(job["id"])) == "measuring\n"
    assert client.result_text(job["id"]) == render.text(done)


def test_wait_ends_at_its_deadline_and_the_job_goes_on(service: Service, client: Client) -> None:
    job = client.submit(SPEC)
    with pytest.raises(TimeoutError, match="queued after"):
        client.wait(job["id"], timeout_s=0.3)
    assert client.cancel(job["id"])["state"] == "canceled"
    with pytest.raises(errors.Conflict):
        client.cancel(job["id"])


def test_the_same_key_is_the_same_job(client: Client) -> None:
    key = uuid.uuid4().hex
    first = client.submit(SPEC, idempotency_key=key)
    assert client.submit(SPEC, idempotency_key=key)["id"] == first["id"]
    with pytest.raises(errors.InvalidRequest):
        client.submit({**SPEC, "seed": 1}, idempotency_key=key)
    client.cancel(first["id"])


def test_a_wrong_spec_is_an_invalid_request_with_pointers(client: Client) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        client.submit({**SPEC, "calls": -1, "colour": "blue"})
    assert {fault["pointer"] for fault in caught.value.errors} == {"/calls", "/colour"}


def test_check_stores_nothing(client: Client) -> None:
    before = [job["id"] for job in client.list()]
    checked = client.check(SPEC)
    assert "eager" in json.dumps(checked)
    assert [job["id"] for job in client.list()] == before


def test_an_unknown_job_is_not_found(client: Client) -> None:
    for ask in (client.job, client.cancel, client.artifacts, lambda job_id: list(client.logs(job_id))):
        with pytest.raises(errors.NotFound):
            ask("01938c5e-7b2c-7d11-8a3f-2f6f0a7d5c11")


def test_list_goes_through_the_pages(client: Client) -> None:
    label = uuid.uuid4().hex
    made = [client.submit({**SPEC, "labels": {"run": label}})["id"] for _ in range(7)]
    assert [job["id"] for job in client.list(label=f"run:{label}")] == made[::-1]
    assert [job["id"] for job in client.list(label=f"run:{label}", limit=3)] == made[:3:-1]
    assert list(client.list(label=f"run:{label}", state="succeeded")) == []
    for job_id in made:
        client.cancel(job_id)


def test_inventory(client: Client) -> None:
    assert [device["name"] for host in client.devices() for device in host["devices"]] == ["cpu:0"]
    (jit,) = [kind for kind in client.kinds() if kind["kind"] == "jit"]
    client.check(jit["example"])


def test_nobody_there_is_unavailable() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(errors.Unavailable, match="torchstone up"):
        client.devices()


# -- downloads --------------------------------------------------------------------------------------------------


class Cutting(httpx.BaseTransport):
    """A line that breaks after `after_bytes` of every body of an artifact, and notes the ranges asked for."""

    def __init__(self, after_bytes: int) -> None:
        self.after_bytes = after_bytes
        self.ranges: list[str | None] = []
        self._real = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._real.handle_request(request)
        if not request.url.path.endswith(".pt"):
            return response
        self.ranges.append(request.headers.get("range"))
        assert isinstance(response.stream, httpx.SyncByteStream)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=_Cut(response.stream, self.after_bytes)
        )

    def close(self) -> None:
        self._real.close()


class _Cut(httpx.SyncByteStream):
    def __init__(self, whole: httpx.SyncByteStream, after_bytes: int) -> None:
        self._whole, self._left_bytes = whole, after_bytes

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._whole:
            yield chunk[: self._left_bytes]
            self._left_bytes -= len(chunk)
            if self._left_bytes <= 0:
                raise httpx.ReadError("the line broke")

    def close(self) -> None:
        self._whole.close()


def test_a_download_is_whole_and_checked(client: Client, finished: dict[str, Any], tmp_path: Path) -> None:
    (artifact,) = client.artifacts(finished["id"])
    assert (artifact["bytes"], artifact["sha256"]) == (len(BYTES), hashlib.sha256(BYTES).hexdigest())
    path = client.download(finished["id"], "script.pt", tmp_path / "script.pt")
    assert path.read_bytes() == BYTES
    assert not (tmp_path / "script.pt.part").exists()
    with pytest.raises(errors.NotFound, match=r"it has: script\.pt"):
        client.download(finished["id"], "trace.pt", tmp_path / "trace.pt")


@pytest.mark.parametrize("there", [BYTES[: 1 << 20], BYTES, BYTES + b"more", b"of something else"])
def test_what_is_there_already_is_used_or_replaced(
    client: Client, finished: dict[str, Any], tmp_path: Path, there: bytes
) -> None:
    (tmp_path / "script.pt.part").write_bytes(there)
    assert client.download(finished["id"], "script.pt", tmp_path / "script.pt").read_bytes() == BYTES


def test_a_broken_line_is_resumed_where_it_broke(service: Service, finished: dict[str, Any], tmp_path: Path) -> None:
    line = Cutting(after_bytes=1 << 20)
    with Client(service.url, transport=line) as client:
        assert client.download(finished["id"], "script.pt", tmp_path / "script.pt").read_bytes() == BYTES
    assert line.ranges[:2] == [None, f"bytes={1 << 20}-"]


def test_a_line_that_gives_nothing_is_unavailable(service: Service, finished: dict[str, Any], tmp_path: Path) -> None:
    with Client(service.url, transport=Cutting(after_bytes=0)) as client, pytest.raises(errors.Unavailable):
        client.download(finished["id"], "script.pt", tmp_path / "script.pt")
    assert not (tmp_path / "script.pt").exists()


# -- the commands -----------------------------------------------------------------------------------------------


def torchstone(service: Service, *words: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHSTONE_") or k == VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", "from torchstone.cli import main; main()", *words],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**inherited, "TORCHSTONE_URL": service.url},
    )


def test_the_commands_of_a_finished_job(service: Service, finished: dict[str, Any], tmp_path: Path) -> None:
    job_id = finished["id"]

    def said(*words: str) -> str:
        done = torchstone(service, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said("get", job_id) == render.text(finished)
    assert json.loads(said("get", job_id, "--json")) == finished
    assert said("watch", job_id) == render.text(finished)
    assert said("logs", job_id, "--follow") == "measuring\n"
    assert f"{job_id}  jit" in said("list", "--state", "succeeded")
    assert said("download", job_id, "script.pt") == "script.pt\n"
    assert (tmp_path / "script.pt").read_bytes() == BYTES
    assert "cpu:0" in said("devices")
    assert "jit" in said("kinds")


def test_submit_and_cancel(service: Service, client: Client, tmp_path: Path) -> None:
    done = torchstone(service, "submit", "-", cwd=tmp_path, stdin=json.dumps(SPEC))
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    assert client.job(job_id)["state"] == "queued"
    assert torchstone(service, "cancel", job_id, cwd=tmp_path).stdout == "canceled\n"
    watched = torchstone(service, "watch", job_id, cwd=tmp_path)
    assert watched.returncode == 1  # it did not succeed
    assert "canceled" in watched.stdout
    again = torchstone(service, "cancel", job_id, cwd=tmp_path)
    assert again.returncode == 1
    assert again.stderr.startswith("torchstone: ")


def test_a_wrong_spec_is_shown_with_its_pointers(service: Service, tmp_path: Path) -> None:
    done = torchstone(service, "submit", "-", cwd=tmp_path, stdin=json.dumps({**SPEC, "calls": -1}))
    assert done.returncode == 1
    assert done.stderr.startswith("torchstone: /calls: ") and done.stderr.count("\n") == 1
    done = torchstone(service, "submit", "-", cwd=tmp_path, stdin=json.dumps({**SPEC, "calls": -1, "seed": -1}))
    assert done.returncode == 1
    assert "  /calls: " in done.stderr and "  /seed: " in done.stderr


def test_check_prints_the_spec_with_its_defaults(service: Service, tmp_path: Path) -> None:
    done = torchstone(service, "submit", "--check", "-", cwd=tmp_path, stdin=json.dumps(SPEC))
    assert '"batch_sizes"' in done.stdout


def _device(name: str) -> dict[str, Any]:
    return {"name": name, "type": "cpu", "cores": [0], "description": "a core"}


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/healthz").status_code == 200
    return False
