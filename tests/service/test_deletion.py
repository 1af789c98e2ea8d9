"""DELETE, 410 afterwards, and what is kept for so long; a real service, both databases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from tests.service.conftest import SPEC, Service
from tests.torchstone.processes import wait_until
from tests.torchstone.store_samples import claim, up
from torchstone.client import Client
from torchstone.errors import Conflict, Gone
from torchstone.store import jobs, retention


def ended(service: Service, *files: tuple[str, bytes]) -> str:
    """A job that ended with these files."""
    host = up(service.store, cpu=4)
    job_id: str = service.submit()["id"]
    service.finish(claim(service.store, host), files=dict(files))
    return job_id


def test_a_deleted_job_is_gone_with_everything_below_it(service: Service) -> None:
    job_id = ended(service, ("a.txt", b"bytes"))
    links = service.job(job_id)["links"]
    [item] = service.http.get(links["artifacts"]).json()["items"]
    assert service.http.get(item["href"]).content == b"bytes"
    answer = service.http.delete(links["self"])
    assert (answer.status_code, answer.content) == (204, b"")
    for path in (*links.values(), item["href"], f"{links['charts']}/accuracy.svg"):
        answer = service.http.post(path) if path == links["cancel"] else service.http.get(path)
        assert answer.status_code == 410, path
        assert "deleted on request, 20" in answer.json()["detail"]
    assert service.http.delete(links["self"]).status_code == 410
    assert service.http.get("/v1/jobs").json()["items"] == []
    # its bytes follow at once, without waiting for the next round
    wait_until(lambda: service.blobs.size(item["sha256"]) is None, within_s=10)


def test_only_what_has_ended_can_be_deleted(service: Service) -> None:
    job = service.submit()
    answer = service.http.delete(job["links"]["self"])
    assert answer.status_code == 409 and "cancel it" in answer.json()["detail"]
    assert service.http.delete("/v1/jobs/01938c5e-7b2c-7d11-8a3f-2f6f0a7d5c11").status_code == 404
    with Client(str(service.http.base_url)) as client:
        with pytest.raises(Conflict):
            client.delete(job["id"])
        client.cancel(job["id"])
        client.delete(job["id"])
        with pytest.raises(Gone):
            client.job(job["id"])


def test_whoever_watches_a_job_that_is_deleted_is_told(service: Service) -> None:
    job = service.submit()
    told: list[int] = []
    streamed = threading.Event()

    def wait() -> None:
        told.append(service.http.get(job["links"]["self"], params={"wait": "30"}).status_code)

    def stream() -> None:
        with service.http.stream("GET", job["links"]["events"]) as answer:
            for _ in answer.iter_lines():
                streamed.set()
        told.append(0)

    threads = [threading.Thread(target=each, daemon=True) for each in (wait, stream)]
    for thread in threads:
        thread.start()
    assert streamed.wait(10)
    with service.store.write() as conn:  # both at once: there is no moment in which it is seen to have ended
        jobs.cancel(conn, job["id"])
        retention.delete_job(conn, job["id"], "deleted on request")
    for thread in threads:
        thread.join(10)
    assert sorted(told) == [0, 410]


def test_a_key_of_a_deleted_job_makes_a_new_one(service: Service) -> None:
    key = {"Idempotency-Key": "k"}
    first = service.post(SPEC, headers=key).json()
    service.http.post(first["links"]["cancel"])
    service.http.delete(first["links"]["self"])
    second = service.post(SPEC, headers=key).json()
    assert second["id"] != first["id"] and second["state"] == "queued"


def test_a_setting_deletes_what_is_old(start: Callable[..., Service]) -> None:
    service = start(keep_days=0.2 / 86_400, collect_s=0.05)
    job_id = ended(service)
    time.sleep(0.2)
    wait_until(lambda: service.http.get(f"/v1/jobs/{job_id}").status_code == 410, within_s=10)
    assert service.http.get(f"/v1/jobs/{job_id}").json()["detail"].endswith("Z")


def test_the_bytes_of_a_job_that_stays_stay(service: Service) -> None:
    first, second = ended(service, ("a.txt", b"shared")), ended(service, ("b.txt", b"shared"))
    service.http.delete(f"/v1/jobs/{first}")
    service.http.delete(f"/v1/jobs/{ended(service, ('c.txt', b'other'))}")
    [item] = service.http.get(f"/v1/jobs/{second}/artifacts").json()["items"]
    assert service.http.get(item["href"]).content == b"shared"
