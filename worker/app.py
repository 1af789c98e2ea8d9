"""The Celery worker: one task, which answers a doorbell.

    receive "there is work for a gang of k" -> host.look(): claim, lease, launch -> back to the broker

The task returns as soon as jobs are started; the host's own threads run and record them. While fewer than k devices are
free, the queue of gangs of k is not consumed: the bell then waits for the first host that can answer it.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import structlog
from celery import Celery, signals
from celery.exceptions import SecurityWarning
from sqlalchemy.exc import SQLAlchemyError

from torchstone.queue import TASK, celery_app, queue_name
from torchstone.settings import Settings
from worker.host import WorkerHost

log = structlog.get_logger(__name__)


class DoorbellQueues:
    """The queues that this host listens to: those whose gangs its free devices could take."""

    def __init__(self, app: Celery, host: WorkerHost) -> None:
        kinds = [device.type for device in host.devices.values()]
        self._most = {"cuda": kinds.count("cuda"), "cpu": kinds.count("cpu")}
        self._wanted = set(self.all)
        self._app = app
        self._consumer: Any = None
        app.amqp.queues.select(self.all)

    @property
    def all(self) -> list[str]:
        """Every queue that this host could ever answer."""
        return [queue_name(kind, k) for kind, most in self._most.items() for k in range(1, most + 1)]

    def attach(self, consumer: Any) -> None:
        """The broker is connected: from now on queues are opened and shut through `consumer`."""
        self._consumer = consumer

    def fit(self, cuda_free: int, cpu_free: int) -> None:
        """Listen to exactly the queues of gangs that fit the free devices; safe from any thread, cheap to repeat.

        What is asked of Celery's loop is lost when its connection breaks in that moment: so this is called again and
        again, and looks at what is, not at what was asked for.
        """
        free = {"cuda": cuda_free, "cpu": cpu_free}
        self._wanted = {queue_name(kind, k) for kind in free for k in range(1, free[kind] + 1)}
        if self._consumer is not None and self._wanted != self._open:
            self._consumer.call_soon(self._adjust)

    @property
    def _open(self) -> set[str]:
        return set(self._app.amqp.queues.consume_from)

    def _adjust(self) -> None:
        """In Celery's own thread: open and shut what differs."""
        for queue in sorted(self._open - self._wanted):
            self._consumer.cancel_task_queue(queue)
        for queue in sorted(self._wanted - self._open):
            self._consumer.add_task_queue(queue)


def build(settings: Settings, host: WorkerHost) -> Celery:
    """The Celery app of this worker, with its task bound to `host`."""
    app = celery_app(settings)
    queues = DoorbellQueues(app, host)
    host.on_free_change = queues.fit

    @app.task(name=TASK)
    def look() -> None:
        """Something may be due: see `WorkerHost.look`."""
        try:
            host.look()
        except SQLAlchemyError as error:  # the keeper looks again by itself
            log.warning("a doorbell rang while the database was away", error=str(error).splitlines()[0])

    @signals.worker_ready.connect(weak=False)
    def attach(sender: Any, **_: Any) -> None:
        queues.attach(sender)
        queues.fit(*host.free())

    @signals.worker_shutting_down.connect(weak=False)
    def drain(**_: Any) -> None:
        # At once, beside Celery's own way out, which waits for a broker that may not answer.
        threading.Thread(target=host.drain, name="drain", daemon=True).start()

    return app


def serve(app: Celery) -> None:
    """Answer doorbells until SIGTERM or SIGINT; a broker that goes away is waited for."""
    # Celery warns of root because a pickled message would be code; this app takes JSON alone.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    worker = app.Worker(
        pool="threads",
        concurrency=4,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        loglevel="WARNING",
        quiet=True,
    )
    worker.start()
