"""kombu 5.7.0 ends a Celery worker that holds an unacknowledged message when its broker dies: ours never holds one.

Two workers of Celery alone, each in the middle of a task when the broker is killed. With our settings it lives and does
the next task. With late acknowledgement it dies; when that test fails, kombu has mended it, and the settings in
`torchstone.queue` may be thought over.
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
import sys, time
from pathlib import Path
from torchstone.queue import TASK, celery_app
from torchstone.settings import Settings
app = celery_app(Settings())
if sys.argv[1] == "late":
    app.conf.task_acks_late = True
    app.conf.worker_disable_prefetch = False
app.amqp.queues.select(["cpu.k1"])
@app.task(name=TASK)
def look():
    began = Path(f"began{len(list(Path.cwd().glob('began*')))}")
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


@pytest.mark.parametrize("acknowledges", ["early", "late"])
def test_a_worker_amid_a_task_survives_its_broker_only_if_it_holds_no_message(
    start_broker: Callable[[], subprocess.Popen[bytes]], tmp_path: Path, acknowledges: str
) -> None:
    settings = Settings(data=tmp_path)
    server = start_broker()

    def ring() -> None:
        with celery_app(settings, publisher=True) as app:
            app.send_task(TASK, queue="cpu.k1")

    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, acknowledges],
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
        if acknowledges == "late":
            assert worker.wait(30) != 0
            assert "'NoneType' object has no attribute 'hostname'" in (tmp_path / "log").read_text()
            return
        start_broker()
        (tmp_path / "go").touch()
        ring()
        wait_until(lambda: len(list(tmp_path.glob("ended*"))) == 2, within_s=30)
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()
