"""The service under test: a real uvicorn on a free port, a real database, a real broker, a real artifact folder.

    def test_something(service: Service):              # on SQLite and on PostgreSQL
        job = service.submit()
        claimed = claim(service.store, up(service.store))
        service.finish(claimed, files={"script.pt": b"..."})

No worker runs: tests drive the very store functions that a worker calls.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from service.app import create_app
from tests.torchstone.processes import wait_until
from torchstone import broker
from torchstone.jobs import State
from torchstone.settings import Settings
from torchstone.store import Store, claims, leases
from torchstone.store.artifacts import Blobs

SPEC: dict[str, Any] = {"kind": "jit", "model": {"preset": "mlp"}}


@dataclass
class Service:
    """A running service, and the store behind it."""

    settings: Settings
    http: httpx.Client
    store: Store
    blobs: Blobs
    port: int
    scratch: Path
    server: uvicorn.Server

    def post(self, spec: Any, **options: Any) -> httpx.Response:
        return self.http.post("/v1/jobs", json=spec, **options)

    def submit(self, **fields: Any) -> dict[str, Any]:
        """A job for one CPU device that shares its machine, unless told otherwise."""
        answer = self.post({**SPEC, "isolation": "device", **fields})
        assert answer.status_code == 202, answer.text
        job: dict[str, Any] = answer.json()
        return job

    def job(self, job_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        job: dict[str, Any] = answer.json()
        return job

    def finish(
        self,
        claimed: claims.Claim,
        outcome: State = State.succeeded,
        *,
        result: str | None = '{"schema":1,"timings":[]}',
        files: dict[str, bytes] | None = None,
        error: dict[str, Any] | None = None,
    ) -> None:
        """End a claimed job as its worker would."""
        rows = [self.stored(name, content) for name, content in (files or {}).items()]
        with self.store.write() as conn:
            leases.finish(conn, claimed.holder, outcome, result=result, files=rows, error=error)

    def stored(self, name: str, content: bytes) -> dict[str, Any]:
        path = self.scratch / "artifact"
        path.write_bytes(content)
        sha256, size = self.blobs.put(path)
        return {"name": name, "media_type": "application/octet-stream", "bytes": size, "sha256": sha256}


@pytest.fixture(scope="session")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An embedded broker for the whole run."""
    settings = Settings(data=tmp_path_factory.mktemp("broker"))
    process = subprocess.Popen(broker.prepare(settings), stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: broker.answers(settings), within_s=10)
        yield settings.broker_url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def start(database_url: str, broker_url: str, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts services on the test's database, with settings of the test's choice."""
    with contextlib.ExitStack() as stack:

        def starting(**settings: Any) -> Service:
            given = {
                "data": tmp_path / "data",
                "database_url": database_url,
                "broker_url": broker_url,
                "reconcile_s": 3600,
            }
            return stack.enter_context(_serving(Settings(**{**given, **settings}), tmp_path))

        yield starting


@pytest.fixture
def service(start: Callable[..., Service]) -> Service:
    """A service with the default settings."""
    return start()


@contextlib.contextmanager
def _serving(settings: Settings, scratch: Path) -> Iterator[Service]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=60,  # a test may think for longer than 5 s between two requests
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn")
    thread.start()
    store = Store(settings.database_url)
    try:
        wait_until(lambda: server.started or not thread.is_alive(), within_s=20)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            yield Service(settings, http, store, Blobs(settings.artifacts_url), port, scratch, server)
    finally:
        server.should_exit = True
        thread.join(20)
        store.dispose()
        listener.close()
        assert not thread.is_alive(), "the service did not stop"
