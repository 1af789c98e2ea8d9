"""kombu 5.7.0 can end a Celery worker that holds an unacknowledged message when its broker dies: ours holds none.

A worker of Celery alone, with our settings, is amid a task when the broker is killed: it lives and does the next one.
Not covered: that other settings (late acknowledgement) still die of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.torchstone.processes import wait_until
from torchstone import broker
from torchstone.queue import TASK, celery_app
from torchstone.settings import Settings

pytestmark = pytest.mark.slow

WORKER = """
import time
from pathlib import Path
from torchstone.queue import TASK, celery_app
from torchstone.settings import Settings
app = celery_app(Settings())
app.amqp.queues.select(["cpu.k1"])
@app.task(name=TASK)
def look():
    began = Path(f"began{time.monotonic_ns()}")
    began.touch()
    while not Path("go").exists():
        time.sleep(0.02)
    began.rename(began.name.replace("began", "ended"))
app.Worker(pool="threads", concurrency=2, without_gossip=True, without_mingle=True, without_heartbeat=True,
           loglevel="ERROR", quiet=True).start()
"""


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    settings = Settings(data=tmp_path)
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(broker.prepare(settings), stdout=subprocess.DEVNULL))
        wait_until(lambda: broker.answers(settings), within_s=20)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_worker_amid_a_task_survives_its_broker(
    start_broker: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    settings = Settings(data=tmp_path)
    server = start_broker()

    def ring() -> None:
        with celery_app(settings, publisher=True) as app:
            app.send_task(TASK, queue="cpu.k1")

    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=tmp_path,
            env={**os.environ, **settings.environment()},
            stdout=log,
            stderr=log,
        )
    try:
        ring()
        wait_until(lambda: list(tmp_path.glob("began*")), within_s=30)
        server.send_signal(signal.SIGKILL)
        server.wait()
        start_broker()
        (tmp_path / "go").touch()
        ring()
        wait_until(lambda: len(list(tmp_path.glob("ended*"))) == 2, within_s=30)
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()
