"""What a finished job has to say, and what it printed and told on the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from tests.service.conftest import Service
from tests.torchstone.sample_jobs import full_result
from tests.torchstone.store_samples import claim, up
from torchstone.jobs import State
from torchstone.store import claims, leases, logs
from torchstone.store import events as store_events

Event = dict[str, str]


def events(service: Service, job_id: str, last_id: str | None = None) -> Iterator[Event]:
    """The events as a client parses them, until the stream ends."""
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    with service.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        event: Event = {}
        for line in answer.iter_lines():
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                event[name] = value
            elif event:
                yield event
                event = {}


def print_lines(service: Service, claimed: claims.Claim, seq: int, text: str) -> None:
    with service.store.write() as conn:
        logs.append(conn, claimed.holder.job_id, claimed.holder.attempt, [(seq, text)])


# -- results ----------------------------------------------------------------------------------------------------


def test_a_result_in_every_format(service: Service) -> None:
    host = up(service.store)
    job_id = service.submit(name="ünïcode")["id"]
    claimed = claim(service.store, host)
    for format_ in ("json", "csv", "txt"):
        early = service.http.get(f"/v1/jobs/{job_id}/result.{format_}")
        assert early.status_code == 409 and "running" in early.json()["detail"]
    service.finish(claimed, result=full_result().to_json())
    job = service.job(job_id)
    answer = service.http.get(f"/v1/jobs/{job_id}/result.json")
    assert answer.json() == job["result"] == json.loads(full_result().to_json())
    again = service.http.get(f"/v1/jobs/{job_id}/result.json", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
    text = service.http.get(f"/v1/jobs/{job_id}/result.txt")
    assert text.headers["content-type"] == "text/plain; charset=utf-8"
    assert "ünïcode" in text.text and "script" in text.text
    table = service.http.get(f"/v1/jobs/{job_id}/result.csv")
    assert table.headers["content-type"] == "text/csv; charset=utf-8" and "script" in table.text


def test_a_job_that_measured_nothing_has_no_result_and_says_why(service: Service) -> None:
    host = up(service.store)
    job_id = service.submit()["id"]
    service.finish(claim(service.store, host), State.failed, result=None, error={"code": "x", "message": "it broke"})
    for format_ in ("json", "csv"):
        answer = service.http.get(f"/v1/jobs/{job_id}/result.{format_}")
        assert answer.status_code == 404 and "it broke" in answer.json()["detail"]
    assert "it broke" in service.http.get(f"/v1/jobs/{job_id}/result.txt").text


# -- logs -------------------------------------------------------------------------------------------------------


def test_logs_are_there_while_the_job_runs(service: Service) -> None:
    host = up(service.store)
    job_id = service.submit()["id"]
    assert service.http.get(f"/v1/jobs/{job_id}/logs").text == ""
    claimed = claim(service.store, host)
    for seq in range(200):
        print_lines(service, claimed, seq, f"line {seq}: ü\n")
    answer = service.http.get(f"/v1/jobs/{job_id}/logs")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == "".join(f"line {seq}: ü\n" for seq in range(200))


def test_logs_of_several_attempts_stand_in_order(service: Service) -> None:
    host = up(service.store)
    job_id = service.submit()["id"]
    for number in (1, 2):
        claimed = claim(service.store, host)
        print_lines(service, claimed, 0, f"attempt {number}\n")
        if number == 1:
            with service.store.write() as conn:
                leases.give_back(conn, claimed.holder, "drained", spent=False, max_attempts=3)
    path = f"/v1/jobs/{job_id}/logs"
    assert service.http.get(path).text == "attempt 1\nattempt 2\n"
    assert service.http.get(path, params={"attempt": "2"}).text == "attempt 2\n"
    answer = service.http.get(path, params={"attempt": "3"})
    assert answer.status_code == 404 and "has had 2 attempts" in answer.json()["detail"]
    assert service.http.get(path, params={"attempt": "0"}).status_code == 422


def test_logs_can_be_followed_to_the_end(service: Service) -> None:
    host = up(service.store)
    job_id = service.submit()["id"]

    def work() -> None:
        claimed = claim(service.store, host)
        for seq in range(5):
            print_lines(service, claimed, seq, f"{seq}\n")
            time.sleep(0.1)
        service.finish(claimed)

    worker = threading.Thread(target=work)
    with service.http.stream("GET", f"/v1/jobs/{job_id}/logs", params={"follow": "true"}) as answer:
        worker.start()
        assert "".join(answer.iter_text()) == "0\n1\n2\n3\n4\n"
    worker.join()


# -- events -----------------------------------------------------------------------------------------------------


def test_events_tell_the_job_s_life_and_end_with_it(service: Service) -> None:
    host = up(service.store)
    job_id = service.submit()["id"]

    def work() -> None:
        claimed = claim(service.store, host)
        for done in range(5):
            time.sleep(0.05)
            with service.store.write() as conn:
                leases.progress(conn, claimed.holder, {"done": done, "total": 5})
        service.finish(claimed)

    worker = threading.Thread(target=work)
    worker.start()
    seen = list(events(service, job_id))
    worker.join()
    assert [event["event"] for event in seen] == ["state", "state", *["progress"] * 5, "state"]
    data = [json.loads(event["data"]) for event in seen]
    assert [d["state"] for d in data if "state" in d] == ["queued", "running", "succeeded"]
    assert [d["done"] for d in data if "done" in d] == [0, 1, 2, 3, 4]
    assert all(d["at"].endswith("Z") for d in data)


def test_events_resume_without_a_gap_from_any_id(service: Service) -> None:
    host = up(service.store)
    job_id = service.submit()["id"]
    claimed = claim(service.store, host)
    with service.store.write() as conn:
        leases.progress(conn, claimed.holder, {"done": 1})
    service.finish(claimed)
    whole = list(events(service, job_id))
    for cut in range(len(whole) - 1):
        assert list(events(service, job_id, whole[cut]["id"])) == whole[cut + 1 :]
    last = service.http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": whole[-1]["id"]})
    assert last.status_code == 204  # tells a browser to stop asking
    assert service.http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "x"}).status_code == 400
    with service.store.write() as conn:  # nobody writes such a one; a stream would never end all the same
        store_events.add(conn, job_id, "killed", {"took_ms": 1})
    assert [event["event"] for event in events(service, job_id, whole[-1]["id"])] == ["killed"]


def test_events_come_as_they_happen(service: Service) -> None:
    job = service.submit()
    stream = events(service, job["id"])
    assert json.loads(next(stream)["data"])["state"] == "queued"
    begin_s = time.monotonic()
    service.http.post(job["links"]["cancel"])
    assert json.loads(next(stream)["data"])["state"] == "canceled"
    assert time.monotonic() - begin_s < 5
    with pytest.raises(StopIteration):
        next(stream)
