"""What there is, whether it works, and how it describes itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sqlalchemy import text

from service.shapes import HostCeilings, HostList, Kind, Problem
from tests.service.conftest import SPEC, Service
from tests.torchstone.processes import wait_until
from tests.torchstone.store_samples import claim, up
from torchstone.results import Figure, Result
from torchstone.specs import KINDS, parse_spec


def test_every_kind_has_a_schema_and_an_example_that_works(service: Service) -> None:
    items = service.http.get("/v1/kinds").json()["items"]
    assert {item["kind"] for item in items} == set(KINDS)
    for item in items:
        Kind.model_validate(item)
        assert service.post(item["example"]).status_code == 202
        assert item["schema"]["properties"]["kind"]["const"] == item["kind"]


def test_devices_say_who_holds_them(service: Service) -> None:
    assert service.http.get("/v1/devices").json() == {"items": [], "next_cursor": None}
    job_id = service.submit()["id"]
    claim(service.store, up(service.store, "bench", cpu=2))
    listed = service.http.get("/v1/devices").json()
    HostList.model_validate(listed)
    [host] = listed["items"]
    assert host["name"] == "bench" and host["state"] == "up"
    assert [(d["name"], (d["held_by"] or {}).get("job")) for d in host["devices"]] == [
        ("cpu:0", job_id),
        ("cpu:1", None),
    ]


def test_a_hosts_ceilings_are_those_of_its_newest_report(service: Service) -> None:
    answer = service.http.get("/v1/hosts/bench/ceilings")
    assert answer.status_code == 404 and "not a host" in answer.json()["detail"]
    job_id = service.post({"kind": "hardware"}).json()["id"]
    claimed = claim(service.store, up(service.store, "bench", cpu=2))
    assert "no hardware report" in service.http.get("/v1/hosts/bench/ceilings").json()["detail"]
    rate = Figure(name="stream_triad", of="memory", at={"cores": 2}, value=1e10, unit="B/s", bytes=30, seconds=3e-9)
    service.finish(claimed, result=Result(figures=[rate]).to_json())
    answer = service.http.get("/v1/hosts/bench/ceilings")
    assert answer.status_code == 200, answer.text
    found = HostCeilings.model_validate(answer.json())
    assert (found.job, found.grade, found.host) == (job_id, "valid", "bench")
    [ceiling] = found.ceilings
    assert (ceiling.value, ceiling.job, (ceiling.model_extra or {})["bytes"]) == (1e10, job_id, 30)


def test_health(service: Service) -> None:
    assert service.http.get("/healthz").json() == {"status": "ok"}
    answer = service.http.get("/readyz")
    assert answer.status_code == 200
    parts = dict.fromkeys(("database", "broker", "artifacts", "service"), "ok")
    assert answer.json() == {"status": "ready", "parts": parts}


def test_not_ready_while_the_database_takes_no_jobs(service: Service) -> None:
    """It can be read, and its schema is right; but somebody keeps its lock."""
    with service.store.write() as conn:
        if conn.dialect.name == "postgresql":
            conn.execute(text("LOCK TABLE jobs IN EXCLUSIVE MODE"))
        with ThreadPoolExecutor(1) as clients:
            posted = clients.submit(service.post, SPEC)
            wait_until(lambda: service.http.get("/readyz").status_code == 503, within_s=12)
            parts = service.http.get("/readyz").json()["parts"]
            assert "has not taken new jobs for" in parts["service"] and parts["database"] == "ok"
            conn.rollback()
            assert posted.result().status_code in (202, 503)
    wait_until(lambda: service.http.get("/readyz").status_code == 200, within_s=10)


def test_a_process_that_stops_or_has_lost_a_part_is_not_ready(service: Service) -> None:
    runtime = service.server.config.app.state.runtime  # type: ignore[union-attr]
    [writer] = [task for task in runtime.tasks if task.get_name() == "writer"]
    runtime.loop.call_soon_threadsafe(writer.cancel)
    wait_until(lambda: service.http.get("/readyz").status_code == 503, within_s=10)
    assert "writer" in service.http.get("/readyz").json()["parts"]["service"]
    runtime.stopping = True
    assert "about to stop" in service.http.get("/readyz").json()["parts"]["service"]
    assert service.http.get("/healthz").status_code == 200


def test_a_dead_broker_is_told_and_costs_a_post_nothing(start: Callable[..., Service], tmp_path: Path) -> None:
    service = start(broker_url=f"redis+socket://{tmp_path}/nobody.sock?virtual_host=0")
    answer = service.http.get("/readyz")
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["parts"]["broker"] != "ok" and answer.json()["parts"]["database"] == "ok"
    assert service.post(SPEC, timeout=2).status_code == 202


def test_an_old_schema_and_lost_artifacts_are_told(service: Service) -> None:
    with service.store.write() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '0000'"))
    shutil.rmtree(service.settings.data / "artifacts")
    try:
        parts = service.http.get("/readyz").json()["parts"]
    finally:
        with service.store.write() as conn:
            conn.execute(text("UPDATE alembic_version SET version_num = '0002'"))
    assert "0000" in parts["database"] and parts["broker"] == "ok" and parts["artifacts"] != "ok"


def test_the_description_is_whole_and_its_examples_are_valid(service: Service) -> None:
    description = service.http.get("/openapi.json").json()
    assert description["openapi"].startswith("3.1")
    schemas = description["components"]["schemas"]
    references = set(_references(description))
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= set(schemas)
    submit = description["paths"]["/v1/jobs"]["post"]
    examples = submit["requestBody"]["content"]["application/json"]["examples"]
    assert set(examples) == set(KINDS)
    for example in examples.values():
        parse_spec(example["value"])
    for path, operations in description["paths"].items():
        for operation in operations.values():
            assert operation["responses"]["4XX"]["content"].keys() == {"application/problem+json"}, path
            assert "422" not in operation["responses"] and operation["summary"]
    for path in ("", "/{job_id}", "/{job_id}/cancel", "/{job_id}/events", "/{job_id}/logs", "/{job_id}/result.json"):
        assert f"/v1/jobs{path}" in description["paths"]


def test_allow_names_every_method_of_a_path(service: Service) -> None:
    for path, allowed in (
        ("/v1/jobs", "GET, HEAD, POST"),
        ("/v1/jobs/x", "DELETE, GET, HEAD"),
        ("/healthz", "GET, HEAD"),
    ):
        answer = service.http.put(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_every_wrong_turn_is_a_problem_document(service: Service) -> None:
    for method, path, status in (
        ("GET", "/nope", 404),
        ("GET", "/v1/jobs/", 404),
        ("PUT", "/v1/jobs", 405),
        ("DELETE", "/v1/devices", 405),
        ("GET", "/v1/devices?x=1", 422),
        ("GET", "/v1/kinds?x=1", 422),
        ("POST", "/v1/jobs?x=1", 422),
    ):
        answer = service.http.request(method, path)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
        problem = Problem.model_validate(answer.json())
        assert problem.status == status and problem.title and problem.detail
        assert status != 405 or answer.headers["allow"]


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [reference for item in value.values() for reference in _references(item)]
    if isinstance(value, list):
        return [reference for item in value for reference in _references(item)]
    return []
