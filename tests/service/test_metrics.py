"""/metrics: the figures are true, they go on without a database, and the dashboard asks for none that do not exist."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from tests.service.conftest import Service
from tests.torchstone.processes import wait_until
from tests.torchstone.store_samples import claim, up
from torchstone.jobs import State
from torchstone.store import leases

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def samples(service: Service) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels, in the order of the labels' names."""
    answer = service.http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def run_some_jobs(service: Service) -> None:
    """One that failed after a lost attempt, one that was cancelled in the queue, one that runs, two that wait."""
    host = up(service.store, "bench", cpu=3)
    service.submit()
    lost = claim(service.store, host).holder
    with service.store.write() as conn:
        leases.give_back(conn, lost, "r", spent=True, max_attempts=3)
    service.finish(claim(service.store, host), State.failed, error={"code": "timed_out", "message": "m"})
    service.http.post(service.submit()["links"]["cancel"])
    service.submit(devices={"type": "cpu", "count": 2})
    claim(service.store, host)
    service.submit(devices={"type": "cpu", "count": 3})
    service.submit(devices={"type": "cpu", "count": 3})


def test_the_figures_are_those_of_the_database(service: Service) -> None:
    run_some_jobs(service)
    found = samples(service)
    assert found["torchstone_database_up",] == 1
    assert found["torchstone_queue_jobs", "3", "cpu"] == 2
    assert 0 <= found["torchstone_queue_oldest_seconds", "3", "cpu"] < 60
    assert found["torchstone_devices", "cpu", "bench"] == 3
    assert found["torchstone_leases", "cpu", "bench"] == 2
    assert found["torchstone_host_silent_seconds", "bench", "up"] < 60
    # what has ended is told once it is certain that nothing earlier is still to come
    wait_until(lambda: ("torchstone_jobs_ended_total", "", "jit", "canceled") in samples(service), within_s=10)
    for _ in range(2):  # and only once
        found = samples(service)
        assert found["torchstone_jobs_ended_total", "timed_out", "jit", "failed"] == 1
        assert found["torchstone_jobs_ended_total", "", "jit", "canceled"] == 1
        assert found["torchstone_attempts_lost_total",] == 1
        assert found["torchstone_job_run_seconds_count", "jit", "failed"] == 1
        assert found["torchstone_job_wait_seconds_count", "jit"] == 1  # the cancelled one never started


def test_a_queue_that_became_empty_shows_a_zero(service: Service) -> None:
    host = up(service.store, "bench", cpu=3)
    service.submit(devices={"type": "cpu", "count": 3})
    assert samples(service)["torchstone_queue_jobs", "3", "cpu"] == 1
    claim(service.store, host)
    found = samples(service)
    assert found["torchstone_queue_jobs", "3", "cpu"] == 0 == found["torchstone_queue_oldest_seconds", "3", "cpu"]


def test_requests_are_counted_by_route_not_by_path(service: Service) -> None:
    for job_id in (service.submit()["id"], "x", "y"):
        service.http.get(f"/v1/jobs/{job_id}")
    service.http.head("/v1/jobs/x")
    service.http.head("/healthz")
    service.http.get("/nope")
    found = samples(service)
    name = "torchstone_http_request_seconds_count"
    assert found[name, "GET", "/v1/jobs/{job_id}", "200"] == 1
    assert found[name, "GET", "/v1/jobs/{job_id}", "404"] == 2
    assert found[name, "HEAD", "/v1/jobs/{job_id}", "404"] == 1
    assert found[name, "HEAD", "/healthz", "200"] == 1
    assert found[name, "POST", "/v1/jobs", "202"] == 1
    assert found[name, "GET", "none", "404"] == 1


def test_without_its_tables_it_still_answers(service: Service) -> None:
    run_some_jobs(service)
    assert ("torchstone_queue_jobs", "3", "cpu") in samples(service)
    with service.store.write() as conn:
        conn.execute(text("ALTER TABLE hosts RENAME TO hidden"))
    try:
        found = samples(service)
    finally:
        with service.store.write() as conn:
            conn.execute(text("ALTER TABLE hidden RENAME TO hosts"))
    assert found["torchstone_database_up",] == 0
    assert ("torchstone_queue_jobs", "3", "cpu") not in found, "an old figure is worse than none"


def test_the_dashboard_asks_only_for_what_there_is(service: Service) -> None:
    run_some_jobs(service)
    time.sleep(2.5)
    service.http.get("/metrics")
    exist = {name for name, *_ in samples(service)}
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:torchstone|process)_\w+", target["expr"])
    }
    assert asked and asked <= exist, asked - exist
    assert {name for name in exist if name.startswith("torchstone_") and not name.endswith(("_created", "_sum"))} == {
        name for name in asked if name.startswith("torchstone_")
    } | {"torchstone_job_wait_seconds_count", "torchstone_job_run_seconds_count"}
