"""Celery as a doorbell: its settings, the task's name, the queues, and `Bell`, which rings.

A message says "look: there is work for a gang of k devices of this type", nothing more. The host that answers claims
the job that is due from the database, so that a message lost, late or doubled changes nothing.

    bell = Bell(settings)
    bell.ring("cpu", 2)        # returns at once; rings within a few milliseconds are one message

Why these settings: early acknowledgement and no prefetch (a held message dies with its broker connection), no result
backend (the database has the results), no remote control, and socket timeouts short enough that a dead or silent broker
is noticed in seconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import structlog

from torchstone.settings import Settings

if TYPE_CHECKING:
    from celery import Celery

TASK = "torchstone.look"
MOST_BELLS = 16
"""A queue with this many unheard bells says it already."""
_COALESCE_S = 0.02

log = structlog.get_logger(__name__)


def queue_name(device_type: str, count: int) -> str:
    """The queue of gangs of `count` devices of a type, e.g. cpu.k2."""
    return f"{device_type}.k{count}"


def celery_app(settings: Settings, *, publisher: bool = False) -> Celery:
    """The Celery app of this process; a `publisher` gives up on a dead broker within a second or so."""
    from celery import Celery  # takes a third of a second, which an API's start can do without

    transport: dict[str, Any] = {
        "visibility_timeout": 300,
        "socket_timeout": 5,
        "socket_connect_timeout": 3,
        "socket_keepalive": True,
        "health_check_interval": 5,
        "unacked_restore_interval": 5,
        "unacked_restore_throttle": 1,
    }
    if publisher:
        transport |= {"socket_timeout": 1, "socket_connect_timeout": 1, "max_retries": 0}
    app = Celery("torchstone", broker=settings.broker_url, set_as_current=False)
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_pool="threads",
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0},
        broker_transport_options=transport,
    )
    return app


class Bell:
    """Rings workers from a thread of its own: a caller never waits for the broker, nor fails with it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pending: set[tuple[str, int]] = set()
        self._condition = threading.Condition()
        self._closing = False
        self._connection: Any = None  # of the bell's own thread
        self.reachable = True
        """Whether the broker was reached the last time that something was said to it."""
        self._thread = threading.Thread(target=self._run, name="bell", daemon=True)
        self._thread.start()

    def ring(self, device_type: str, count: int) -> None:
        """Say that there is work for `count` devices; `auto` rings for both types."""
        types = ("cuda", "cpu") if device_type == "auto" else (device_type,)
        self.ring_all((kind, count) for kind in types)

    def ring_all(self, gangs: Iterable[tuple[str, int]]) -> None:
        """Ring for several (device type, count) at once."""
        with self._condition:
            self._pending.update(gangs)
            self._condition.notify()

    def close(self) -> None:
        """Ring what is pending, then stop."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(timeout=5)
        self._app.close()

    def answers(self) -> bool:
        """Whether the broker answers now. Takes up to a second or two where it does not."""
        try:
            with self._app.connection_for_write() as connection:
                self.reachable = bool(connection.default_channel.client.ping())
        except Exception:  # whatever the transport raises
            self.reachable = False
        return self.reachable

    @cached_property
    def _app(self) -> Celery:
        return celery_app(self._settings, publisher=True)

    def _run(self) -> None:
        _ = self._app  # made here, before the first bell is due
        closing = False
        while not closing:
            with self._condition:
                self._condition.wait_for(lambda: self._pending or self._closing)
                gangs, self._pending = self._pending, set()
                closing = self._closing
            if gangs:
                self._publish(gangs)
            with self._condition:
                # The first bell of a burst rings at once; the next says what arrived in these few milliseconds.
                self._condition.wait_for(lambda: self._closing, timeout=_COALESCE_S)
        self._disconnect()

    def _publish(self, gangs: set[tuple[str, int]]) -> None:
        try:
            try:
                self._send(gangs)
            except Exception:  # a connection that was idle while the broker restarted
                self._disconnect()
                self._send(gangs)
            self.reachable = True
        except Exception as error:  # whatever the transport raises: the job is stored, and the sweep rings again
            self._disconnect()
            if self.reachable:
                log.warning("the broker cannot be reached; workers will find the jobs by themselves", error=repr(error))
            self.reachable = False

    def _send(self, gangs: set[tuple[str, int]]) -> None:
        if self._connection is None:
            self._connection = self._app.connection_for_write()
        waiting = self._connection.default_channel.client.llen
        for gang in sorted(gangs):
            queue = queue_name(*gang)
            if waiting(queue) < MOST_BELLS:
                self._app.send_task(TASK, queue=queue, connection=self._connection, retry=False)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # it may be broken already
                connection.release()
