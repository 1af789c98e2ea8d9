"""The service as a process: how it starts, refuses to start, and stops."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import insert

from tests.service.conftest import SPEC
from tests.torchstone.processes import wait_until
from torchstone.settings import Settings
from torchstone.store import Store, migrate
from torchstone.store.schema import loose_blobs

PROGRAM = [sys.executable, "-P", "-m", "service"]
SLOW_OR_FORBIDDEN = {"torch", "numpy", "scipy", "celery", "kombu", "redis", "alembic", "mako", "psycopg", "httpx"}


def environment(settings: Settings) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHSTONE_")}
    return {**inherited, **settings.environment()}


@contextlib.contextmanager
def running(settings: Settings, **more: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """The process, its URL, and the file that it logs to."""
    log = settings.data / "service.log"
    with log.open("wb") as out:
        process = subprocess.Popen(PROGRAM, env={**environment(settings), **more}, stdout=out, stderr=out)
    try:
        wait_until(lambda: process.poll() is not None or b"listening" in log.read_bytes(), 30, log.read_text)
        found = re.search(r"http://\S+", log.read_text())
        assert found, log.read_text()
        with httpx.Client(base_url=found[0]) as http:
            wait_until(lambda: answers(http), 30, log.read_text)
        yield process, found[0], log
    finally:
        process.kill()
        process.wait()


def answers(http: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return http.get("/healthz").status_code == 200
    return False


def refused(settings: Settings, **more: str) -> str:
    run = subprocess.run(
        PROGRAM, env={**environment(settings), **more}, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    return run.stderr


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(data=tmp_path, port=0)
    migrate(settings.database_url)
    return settings


def test_it_refuses_a_database_that_is_not_current(tmp_path: Path) -> None:
    assert "torchstone migrate" in refused(Settings(data=tmp_path, port=0))


def test_it_refuses_a_database_that_is_not_there(tmp_path: Path) -> None:
    url = "postgresql://me:secret@127.0.0.1:1/none"
    told = refused(Settings(data=tmp_path, port=0, database_url=url))
    assert "cannot be used" in told and "secret" not in told


def test_it_refuses_a_port_that_is_taken_and_settings_that_make_no_sense(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused(settings.model_copy(update={"port": port}))
    assert "TORCHSTONE_PORT" in refused(settings, TORCHSTONE_PORT="x")


def test_its_start_loads_nothing_slow() -> None:
    code = "import service.__main__, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not SLOW_OR_FORBIDDEN & set(run.stdout.split())


def test_it_stops_at_once_though_clients_wait(settings: Settings) -> None:
    with running(settings) as (process, url, log), httpx.Client(base_url=url, timeout=30) as http:
        job = http.post("/v1/jobs", json=SPEC).json()
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(http.get(job["links"]["self"], params={"wait": "30"})))
        waiting.start()
        with http.stream("GET", job["links"]["events"]) as events:
            lines = events.iter_lines()
            assert next(lines).startswith("id:")
            begin_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.RemoteProtocolError):
                list(lines)
        waiting.join(10)
        assert process.wait(10) == 0, log.read_text()
        assert time.monotonic() - begin_s < 5
        assert answers[0].json()["state"] == "queued"
        assert "Traceback" not in log.read_text()


def test_it_stops_at_once_though_a_bucket_does_not_answer(settings: Settings) -> None:
    store = Store(settings.database_url)
    with store.write() as conn:
        conn.execute(insert(loose_blobs).values(sha256="0" * 64, job_id="one that is gone", attempt=0))
    store.dispose()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        keys = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "here"}
        away = {"AWS_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "AWS_ALLOW_HTTP": "true", **keys}
        asking = settings.model_copy(update={"artifacts_url": "s3://bucket", "collect_s": 0.1})
        with running(asking, **away) as (process, _, log):
            silent.settimeout(30)
            asked, _ = silent.accept()
            process.send_signal(signal.SIGTERM)
            begin_s = time.monotonic()
            assert process.wait(20) == 0, log.read_text()
            assert time.monotonic() - begin_s < 5
            assert "Traceback" not in log.read_text()
            asked.close()


def test_what_was_accepted_survives_a_kill(settings: Settings) -> None:
    accepted: list[str] = []
    with running(settings) as (process, url, _), httpx.Client(base_url=url) as http:
        for _ in range(20):
            accepted.append(http.post("/v1/jobs", json=SPEC).json()["id"])
        process.kill()
        process.wait()
    with running(settings) as (_, url, _), httpx.Client(base_url=url) as http:
        assert {item["id"] for item in http.get("/v1/jobs").json()["items"]} == set(accepted)


def test_a_locked_database_is_a_503_and_no_more(settings: Settings) -> None:
    with running(settings) as (_, url, log), httpx.Client(base_url=url, timeout=60) as http:
        store = Store(settings.database_url)
        with store.write():
            begin_s = time.monotonic()
            answer = http.post("/v1/jobs", json=SPEC)
            assert answer.status_code == 503 and answer.headers["retry-after"] and "Idempotency-Key" in answer.text
            assert time.monotonic() - begin_s < 30
            assert http.get("/healthz").status_code == http.get("/v1/jobs").status_code == 200
        store.dispose()
        assert http.post("/v1/jobs", json=SPEC).status_code == 202
        assert "Traceback" not in log.read_text()


def test_an_unexpected_error_is_logged_and_not_shown(settings: Settings) -> None:
    with running(settings) as (_, url, log), httpx.Client(base_url=url, timeout=60) as http:
        store = Store(settings.database_url)
        with store.write() as conn:
            conn.exec_driver_sql("ALTER TABLE jobs RENAME TO elsewhere")
        store.dispose()
        answer = http.get("/v1/jobs")
        assert answer.status_code == 500 and answer.headers["content-type"] == "application/problem+json"
        assert "elsewhere" not in answer.text and "Traceback" not in answer.text and "SELECT" not in answer.text
        assert "no such table" in log.read_text()
