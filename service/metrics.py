"""Figures for Prometheus: what waits, what runs, how jobs end, who is heard of, and how requests are answered.

    metrics = Metrics(database, settings)
    body, media_type = await metrics.render()

What is true of the whole installation (queue, leases, hosts, jobs that ended) is read from the database when it is
asked for, so every API process tells the same: take `max without (instance)`. Counters of jobs begin at zero with this
process, as Prometheus expects, and run `_LAG_S` late, since a transaction shows its time only once it is committed.
HTTP figures are this process's own; a request counts until its answer begins, so waits and streams count as they were
asked for. `docs/grafana.json` shows them.
"""

from __future__ import annotations

from time import monotonic, perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.database import Database
from torchstone.settings import Settings
from torchstone.store import census

_LAG_S = 2.0
_HTTP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
_JOB_BUCKETS_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_GANG = ("device_type", "device_count")


class Metrics:
    """The figures of one API process."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings
        self._begun_s = monotonic()
        self._ended_until_us: int | None = None
        self._http: dict[tuple[str, str, int], Any] = {}
        self._gangs: set[tuple[str, str]] = set()
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        of_request = ("method", "route", "status")
        self.http_s = Histogram(
            "torchstone_http_request_seconds",
            "Until an answer began.",
            of_request,
            buckets=_HTTP_BUCKETS_S,
            registry=registry,
        )
        self._database_up = Gauge(
            "torchstone_database_up", "Whether the database answered this time.", registry=registry
        )
        self._queued = Gauge("torchstone_queue_jobs", "Jobs that wait, by gang.", _GANG, registry=registry)
        self._oldest_s = Gauge(
            "torchstone_queue_oldest_seconds", "Age of the oldest job that waits.", _GANG, registry=registry
        )
        of_device = ("host", "device_type")
        self._devices = Gauge("torchstone_devices", "Devices of hosts that are heard of.", of_device, registry=registry)
        self._leases = Gauge("torchstone_leases", "Devices that a job holds.", of_device, registry=registry)
        self._silent_s = Gauge(
            "torchstone_host_silent_seconds", "Since the host's last heartbeat.", ("host", "state"), registry=registry
        )
        self._ended = Counter(
            "torchstone_jobs_ended", "Jobs that ended.", ("kind", "outcome", "code"), registry=registry
        )
        self._lost = Counter("torchstone_attempts_lost", "Attempts that ended jobs had lost.", registry=registry)
        self._wait_s = Histogram(
            "torchstone_job_wait_seconds",
            "From submission to the start of the last attempt.",
            ("kind",),
            buckets=_JOB_BUCKETS_S,
            registry=registry,
        )
        self._run_s = Histogram(
            "torchstone_job_run_seconds",
            "The last attempt, from its start to the job's end.",
            ("kind", "outcome"),
            buckets=_JOB_BUCKETS_S,
            registry=registry,
        )

    async def render(self) -> tuple[bytes, str]:
        """Everything in Prometheus' text format, and its media type. Without a database, what can be said without."""
        for gauge in (self._queued, self._oldest_s, self._devices, self._leases, self._silent_s):
            gauge.clear()
        try:
            found, ended = await self._database.read(self._look)
        except SQLAlchemyError:
            self._database_up.set(0)
        else:
            self._database_up.set(1)
            self._show(found)
            self._count(ended)
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def request(self, method: str, route: str, status: int, took_s: float) -> None:
        """Count one answered request."""
        key = (method, route, status)
        found = self._http.get(key)
        if found is None:
            found = self._http[key] = self.http_s.labels(method, route, str(status))
        found.observe(took_s)

    def _look(self, conn: Connection) -> tuple[census.Census, list[census.Ended]]:
        found = census.take(conn, self._settings.lease_s)
        until_us = found.now_us - int(_LAG_S * 1e6)
        since_us = self._ended_until_us
        if since_us is None:
            since_us = found.now_us - int((monotonic() - self._begun_s) * 1e6)
        until_us = max(until_us, since_us)
        ended = census.ended(conn, since_us, until_us)
        self._ended_until_us = until_us  # only now: what could not be asked is asked again
        return found, ended

    def _show(self, found: census.Census) -> None:
        for labels in self._gangs:  # nobody waits there any more: a zero, where no line would read as no data
            self._queued.labels(*labels).set(0)
            self._oldest_s.labels(*labels).set(0)
        for gang in found.queue:
            labels = (gang.device_type, str(gang.device_count))
            self._gangs.add(labels)
            self._queued.labels(*labels).set(gang.jobs)
            self._oldest_s.labels(*labels).set(max(0.0, (found.now_us - gang.oldest_us) / 1e6))
        for host in found.hosts:
            self._silent_s.labels(host.name, host.state).set(host.silent_s)
            for device_type, count in host.devices.items():
                self._devices.labels(host.name, device_type).set(count)
                self._leases.labels(host.name, device_type).set(host.leased.get(device_type, 0))

    def _count(self, ended: list[census.Ended]) -> None:
        for job in ended:
            self._ended.labels(job.kind, job.state, job.code or "").inc()
            self._lost.inc(job.lost)
            if job.started_us is not None:
                self._wait_s.labels(job.kind).observe(max(0.0, (job.started_us - job.created_us) / 1e6))
                self._run_s.labels(job.kind, job.state).observe(max(0.0, (job.finished_us - job.started_us) / 1e6))


class CountRequests:
    """Tells `Metrics` of each request, by the route that answered it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_s = perf_counter()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                took_s = perf_counter() - begin_s
                route = getattr(scope.get("route"), "path", "none")
                scope["app"].state.runtime.metrics.request(scope["method"], route, message["status"], took_s)
            await send(message)

        await self._app(scope, receive, noting)
