"""POST /v1/jobs: accepted durably, once, or refused with a sentence and a pointer."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis import Redis

from tests.service.conftest import SPEC, Service
from tests.torchstone.processes import wait_until
from tests.torchstone.store_samples import claim, up
from torchstone.store import jobs

LINEAR = {"type": "Linear", "in_features": 3, "out_features": 2}


def test_a_spec_becomes_a_queued_job_with_every_default_filled_in(service: Service) -> None:
    answer = service.post({**SPEC, "name": "first", "labels": {"team": "vision"}})
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}" == job["links"]["self"]
    assert answer.headers["retry-after"] == "1"
    assert job["state"] == "queued" and job["name"] == "first" and job["labels"] == {"team": "vision"}
    assert job["spec"]["variants"] == ["eager", "script", "trace"]
    assert job["waiting_for"] == {"position": 1, "reason": "no worker host is up", "blocked_by": []}
    assert job["attempts"] == [] and job["result"] is None and job["error"] is None
    assert service.job(job["id"]) == job


def test_it_rings_for_the_gang_that_the_job_needs(service: Service) -> None:
    path = service.settings.broker_url.removeprefix("redis+socket://").partition("?")[0]
    with Redis(unix_socket_path=path) as client:
        client.delete("cpu.k3")
        service.submit(devices={"type": "cpu", "count": 3})
        wait_until(lambda: client.llen("cpu.k3") == 1, within_s=10)


def test_curl_sends_json_under_the_name_of_a_form(service: Service) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps(SPEC)
    assert service.http.post("/v1/jobs", content=body, headers=headers).status_code == 202
    # Any page could make a browser send that.
    foreign = service.http.post("/v1/jobs", content=body, headers={**headers, "Origin": "https://elsewhere.example"})
    assert foreign.status_code == 415
    assert service.http.post("/v1/jobs", content=body, headers={"Content-Type": "text/plain"}).status_code == 415


@pytest.mark.parametrize(
    ("spec", "pointer", "words"),
    [
        ({"kind": "jitt"}, "/kind", "unknown kind 'jitt'"),
        ({}, "/kind", "required"),
        ([], "", "object"),
        ({**SPEC, "modell": 1}, "/modell", "unknown field"),
        ({**SPEC, "modle": 1}, "/modle", "did you mean model?"),
        ({**SPEC, "devices": {"cuont": 1}}, "/devices/cuont", "did you mean count?"),
        ({**SPEC, "devices": 2}, "/devices", "Input should be an object"),
        ({**SPEC, "devices": {"count": -1}}, "/devices/count", "greater than or equal to 1"),
        ({**SPEC, "model": {"preset": "mlp", "layers": []}}, "/model", "one way"),
        (
            {
                **SPEC,
                "model": {"layers": [{"type": "Linear", "in_features": 3, "out_features": 2}], "input_shape": [4]},
            },
            "/model/layers/0",
            "expects",
        ),
        ({**SPEC, "labels": {"a b": "c"}}, "/labels", "label key"),
        ({**SPEC, "variants": ["eager", "eager"]}, "/variants", "each may be named once"),
        ({**SPEC, "batch_sizes": [2, 2]}, "/batch_sizes", "each may be named once"),
        ({**SPEC, "variants": ["script"]}, "/baseline", "'eager' is not among the variants"),
        ({"kind": "hardware", "probes": ["gemm", "gemm"]}, "/probes", "each may be named once"),
        ({"kind": "parallel", "devices": {"count": 1}}, "/devices/count", "two devices are needed by concurrency"),
        ({**SPEC, "seed": 2**70}, "/seed", "integer"),
    ],
)
def test_a_wrong_spec_is_refused_with_a_pointer(service: Service, spec: object, pointer: str, words: str) -> None:
    answer = service.post(spec)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == 422 and problem["title"] and problem["instance"] == "/v1/jobs"
    assert [fault["pointer"] for fault in problem["errors"]] == [pointer]
    assert words in problem["errors"][0]["detail"] and words in problem["detail"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "not acceptable JSON"),
        (b'{"kind": "jit", "timeout_s": nan}', "not acceptable JSON"),
        (b'{"kind": "jit", "timeout_s": NaN', "not acceptable JSON"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"[" * 100_000, "depth limit"),
        (b"[" * 1000 + b"]" * 1000, "nested too deeply"),
        (b'{"kind": "jit", "kind": "jit"}', "'kind' stands twice"),
        (b'{"kind": "jit", "name": "\\ud800"}', "surrogate"),
    ],
)
def test_what_is_not_json_is_a_400_that_says_why(service: Service, body: bytes, words: str) -> None:
    answer = service.http.post("/v1/jobs", content=body)
    assert (answer.status_code, answer.json()["status"]) == (400, 400)
    assert words in answer.json()["detail"]


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
def test_a_number_that_is_none_is_a_422_that_points_at_it(service: Service, number: bytes) -> None:
    body = b'{"kind": "jit", "labels": {"a/b~": ["x", %s]}, "timeout_s": %s}' % (number, number)
    answer = service.http.post("/v1/jobs", content=body)
    assert answer.status_code == 422
    assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/labels/a~1b~0/1", "/timeout_s"]
    assert "finite number" in answer.json()["detail"]


def test_a_compressed_body_is_refused_by_name(service: Service) -> None:
    answer = service.http.post("/v1/jobs", content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415 and "gzip" in answer.json()["detail"]


def test_what_a_database_cannot_hold_is_refused(service: Service) -> None:
    for fields in ({"name": "a\x00b"}, {"labels": {"team": "a\x00b"}}):
        assert service.post({**SPEC, **fields}).status_code == 422


def test_more_devices_than_any_host_has_is_refused_once_a_host_is_known(start: Callable[..., Service]) -> None:
    service = start()
    service.submit(devices={"type": "cpu", "count": 64})  # nobody is up: it may wait
    up(service.store, cpu=2, memory_bytes=1 << 30)
    time.sleep(1.1)  # hosts are remembered for a second
    answer = service.post({**SPEC, "devices": {"type": "cpu", "count": 3}})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/devices/count"
    assert service.post({**SPEC, "devices": {"type": "cuda"}}).json()["errors"][0]["pointer"] == "/devices/type"
    layer = {"type": "Linear", "in_features": 100_000, "out_features": 100_000}
    huge = service.post({**SPEC, "model": {"layers": [layer], "input_shape": [100_000]}})
    assert huge.status_code == 422 and "GB" in huge.json()["detail"]
    held = service.post({"kind": "parallel", "parts": ["overlap"]})  # 100 results of 4000 x 4000
    assert held.status_code == 422 and held.json()["errors"][0]["pointer"] == "/size"
    assert "it needs at least 6." in held.json()["detail"]


def test_a_diagnostic_is_accepted_only_where_a_setting_says_so(start: Callable[..., Service]) -> None:
    sleep = {"kind": "sleep", "seconds": 1}
    service = start()
    assert service.post(sleep).status_code == 422
    assert service.http.get("/v1/jobs?kind=sleep").status_code == 422
    service = start(diagnostics=True)
    job_id = service.post(sleep).json()["id"]
    assert [job["id"] for job in service.http.get("/v1/jobs?kind=sleep").json()["items"]] == [job_id]
    assert "sleep" not in [item["kind"] for item in service.http.get("/v1/kinds").json()["items"]]


def test_validate_only_stores_nothing(service: Service) -> None:
    answer = service.post(SPEC, params={"validate_only": "true"})
    assert answer.status_code == 200
    checked = answer.json()
    assert checked["spec"]["batch_sizes"] == [1] and checked["warnings"] == [
        "no worker host is up: the job would wait for one"
    ]
    assert service.http.get("/v1/jobs").json()["items"] == []
    up(service.store, "bench", cpu=2)
    time.sleep(1.1)
    checked = service.post(SPEC, params={"validate_only": "true"}).json()
    assert checked["would_run"]["hosts"] == ["bench"]
    assert checked["would_run"]["device_type"] == "cpu" and checked["would_run"]["alone_on_its_machine"] is True
    assert checked["warnings"] == ["it would run on CPU devices; such results are never ranked against those of GPUs"]
    unfit = {**SPEC, "variants": ["eager", "cuda_graph"], "devices": {"type": "cpu"}, "timeout_s": 5, "budget_s": 20}
    warnings = service.post(unfit, params={"validate_only": "true"}).json()["warnings"]
    assert [warning.partition(",")[0] for warning in warnings] == [
        "cuda_graph will be skipped: CUDA graphs need a CUDA device",
        "timeout_s",
    ]
    assert service.post({"kind": "x"}, params={"validate_only": "true"}).status_code == 422
    assert service.post(SPEC, params={"validate_only": "maybe"}).status_code == 422


def test_the_same_key_gives_the_same_job(service: Service) -> None:
    first = service.post(SPEC, headers={"Idempotency-Key": "run-42"})
    # the same spec, though other bytes
    again = service.post({**SPEC, "batch_sizes": [1]}, headers={"Idempotency-Key": "run-42"})
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json()["id"] == first.json()["id"]
    assert "idempotent-replayed" not in first.headers and again.headers["idempotent-replayed"] == "true"
    other = service.post({**SPEC, "batch_sizes": [2]}, headers={"Idempotency-Key": "run-42"})
    assert other.status_code == 422 and first.json()["id"] in other.json()["detail"]
    for key in ("", "x" * 256):
        assert service.post(SPEC, headers={"Idempotency-Key": key}).status_code == 400


def test_a_model_larger_than_any_number_in_the_database_stops_nobody(service: Service) -> None:
    """With no host known yet it may wait, for good; the next job is accepted all the same."""
    side = 2**31
    layer = {"type": "Linear", "in_features": side, "out_features": side}
    huge = {**SPEC, "model": {"layers": [layer], "input_shape": [side]}}
    for spec in (huge, SPEC):
        assert service.post(spec).status_code == 202


def test_what_was_accepted_is_answered_again_though_no_host_could_take_it_now(service: Service) -> None:
    spec = {**SPEC, "devices": {"type": "cpu", "count": 64}}
    accepted = service.post(spec, headers={"Idempotency-Key": "large"})
    up(service.store, cpu=2)
    time.sleep(1.1)
    assert service.post(spec).status_code == 422
    again = service.post(spec, headers={"Idempotency-Key": "large"})
    assert again.status_code == 202 and again.json()["id"] == accepted.json()["id"]


def test_ten_at_once_with_one_key_make_one_job_over_two_processes(start: Callable[..., Service]) -> None:
    services = [start(), start()]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda i: services[i % 2].post(SPEC, headers={"Idempotency-Key": "once"}), range(10)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(services[0].http.get("/v1/jobs").json()["items"]) == 1


def test_prefer_wait_answers_with_the_finished_job(service: Service) -> None:
    host = up(service.store)

    def work() -> None:
        wait_until(lambda: _waiting(service), within_s=10)
        service.finish(claim(service.store, host))

    worker = threading.Thread(target=work)
    worker.start()
    answer = service.post({**SPEC, "isolation": "device"}, headers={"Prefer": "respond-async, wait=20"})
    worker.join()
    assert answer.status_code == 200 and answer.headers["preference-applied"] == "wait=20"
    assert answer.json()["state"] == "succeeded" and answer.json()["result"] == {"schema": 1, "timings": []}
    assert "retry-after" not in answer.headers


def test_prefer_wait_is_over_when_it_is_over(service: Service) -> None:
    answer = service.post(SPEC, headers={"Prefer": "wait=0.2"})
    assert answer.status_code == 202 and answer.json()["state"] == "queued"
    assert service.post(SPEC, headers={"Prefer": "wait=soon"}).status_code == 202


def test_a_body_over_the_limit_is_refused_before_it_is_read(service: Service) -> None:
    size = service.settings.max_body_bytes + 1
    answer = service.http.post("/v1/jobs", content=b" " * size)
    assert answer.status_code == 413 and str(size - 1) in answer.json()["detail"]
    # Announced and never sent; chunked and never ended: answered all the same.
    announced = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n"
    assert _raw(service, announced).startswith(b"HTTP/1.1 413")
    chunk = b"%x\r\n" % 65536 + b" " * 65536 + b"\r\n"
    chunked = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 17
    assert _raw(service, chunked).startswith(b"HTTP/1.1 413")
    assert service.http.get("/healthz").status_code == 200


def test_many_clients_at_once_are_all_stored(service: Service) -> None:
    with ThreadPoolExecutor(20) as pool:
        ids = {answer.json()["id"] for answer in pool.map(lambda _: service.post(SPEC), range(200))}
    assert len(ids) == 200
    with service.store.read() as conn:
        assert {row["id"] for row in jobs.page(conn, limit=500)} == ids


def _waiting(service: Service) -> bool:
    with service.store.read() as conn:
        return bool(jobs.page(conn, states=["queued"]))


def _raw(service: Service, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", service.port), timeout=5) as connection:
        connection.sendall(request)
        return connection.recv(4096)
