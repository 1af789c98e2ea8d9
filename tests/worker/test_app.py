"""Doorbells: the worker process with a real broker. It does not poll here, so only a bell can wake it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.worker.test_host import until
from torchstone import broker
from torchstone.jobs import is_terminal
from torchstone.queue import MOST_BELLS, Bell, celery_app
from torchstone.settings import Settings
from torchstone.specs import parse_spec
from torchstone.store import Store, hosts, jobs, migrate

SPEC = {"kind": "jit", "model": {"preset": "mlp"}, "variants": ["eager"], "calls": 10, "budget_s": 0.5}
pytestmark = pytest.mark.slow


class Stand:
    """A broker, a database, and the worker process between them."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(data=folder, poll_s=3600, host_name="stand", drain_s=1, log_level="debug")
        migrate(self.settings.database_url)
        self.store = Store(self.settings.database_url)
        self.log = (folder / "worker.log").open("wb")
        self.broker = self.start_broker()
        self.worker = subprocess.Popen(
            [sys.executable, "-m", "worker"],
            env={**os.environ, **self.settings.environment()},
            stdout=self.log,
            stderr=self.log,
        )
        self.bell = Bell(self.settings)

    def start_broker(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(broker.prepare(self.settings), stdout=subprocess.DEVNULL)
        until(lambda: broker.answers(self.settings))
        return process

    def wait_for_worker(self) -> None:
        def up() -> bool:
            with self.store.read() as conn:
                return any(item["state"] == "up" for item in hosts.inventory(conn, 30))

        until(up)

    def submit(self, ring: bool = True) -> str:
        with self.store.write() as conn:
            [stored] = jobs.insert_many(conn, [jobs.NewJob.of(parse_spec(SPEC))])
        if ring:
            self.bell.ring("auto", 1)
        return stored.job_id

    def state(self, job_id: str) -> str:
        with self.store.read() as conn:
            return jobs.state_of(conn, job_id) or ""

    def ended(self, job_id: str) -> str:
        until(lambda: is_terminal(self.state(job_id)))
        return self.state(job_id)

    def close(self) -> None:
        self.bell.close()
        for process in (self.worker, self.broker):
            if process.poll() is None:
                process.terminate()
            process.wait(timeout=30)
        self.store.dispose()
        self.log.close()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path)
    stand.wait_for_worker()
    yield stand
    stand.close()


def test_a_bell_starts_a_job_and_a_job_that_nobody_rang_for_follows(stand: Stand) -> None:
    # Given two jobs, and a bell for one of them only
    silent = stand.submit(ring=False)
    rung = stand.submit()
    # Then both run: the bell says "look", not which
    assert [stand.ended(silent), stand.ended(rung)] == ["succeeded", "succeeded"]
    # And again, now that the queue was shut and opened
    assert stand.ended(stand.submit()) == "succeeded"


def test_the_broker_may_be_killed_and_come_back_empty(stand: Stand) -> None:
    assert stand.ended(stand.submit()) == "succeeded"
    stand.broker.send_signal(signal.SIGKILL)
    stand.broker.wait()
    # While it is gone a job can be rung for: the caller is not held up, the job waits
    begun_s = time.monotonic()
    waiting = stand.submit()
    assert time.monotonic() - begun_s < 2
    assert stand.worker.poll() is None
    stand.broker = stand.start_broker()

    def rung_again() -> bool:
        stand.bell.ring("cpu", 1)
        return is_terminal(stand.state(waiting))

    until(rung_again)
    assert stand.state(waiting) == "succeeded"
    assert stand.worker.poll() is None, "the worker outlived its broker"


def test_a_killed_worker_leaves_no_process(stand: Stand) -> None:
    stand.ended(stand.submit())
    below = psutil.Process(stand.worker.pid).children(recursive=True)
    assert below, "the forkserver at least"
    stand.worker.send_signal(signal.SIGKILL)
    stand.worker.wait()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not alive


def test_unheard_bells_do_not_pile_up(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)
    server = subprocess.Popen(broker.prepare(settings), stdout=subprocess.DEVNULL)
    until(lambda: broker.answers(settings))
    bell = Bell(settings)

    def waiting() -> int:
        with celery_app(settings).connection_for_read() as connection:
            return int(connection.default_channel.client.llen("cpu.k1"))

    try:
        for count in range(1, MOST_BELLS + 10):
            bell.ring("cpu", 1)
            heard = min(count, MOST_BELLS)
            until(lambda heard=heard: waiting() >= heard)  # type: ignore[misc]
        assert waiting() == MOST_BELLS
    finally:
        bell.close()
        server.terminate()
        server.wait()
