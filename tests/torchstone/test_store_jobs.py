"""Accepting, reading, listing and cancelling jobs, on both databases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, func, select

from tests.torchstone.store_samples import a_host, claim, row, spec, state, submit, up
from torchstone.errors import Conflict, InvalidRequest
from torchstone.jobs import State
from torchstone.specs import BaseSpec
from torchstone.store import Store, claims, events, hosts, jobs, leases
from torchstone.store.ids import new_id
from torchstone.store.jobs import NewJob, Stored
from torchstone.store.schema import idempotency_keys
from torchstone.store.schema import jobs as jobs_table


def accept(store: Store, *new: NewJob) -> list[Stored]:
    with store.write() as conn:
        return jobs.insert_many(conn, new)


def keyed(key: str, **fields: Any) -> NewJob:
    return NewJob.of(spec(**fields), idempotency_key=key)


def test_a_job_reads_back_as_it_was_submitted(store: Store) -> None:
    # When
    wanted = spec(name="é – ok", labels={"run": "1"}, count=2, isolation="host", priority="high", start_within_s=60)
    new = NewJob.of(wanted, memory_bytes=1 << 40, owner="me")
    [stored] = accept(store, new)
    # Then
    job = row(store, stored.job_id)
    assert stored == Stored(new.job_id, created=True, created_us=job["created_us"])
    assert job["spec"] == wanted.model_dump_json()
    assert (job["state"], job["attempt"], job["result"], job["attempts"]) == ("queued", 0, None, [])
    assert (job["name"], job["labels"], job["owner"]) == ("é – ok", '{"run":"1"}', "me")
    assert (job["priority"], job["device_type"], job["device_count"], job["isolation"]) == (2, "cpu", 2, "host")
    assert job["memory_bytes"] == 1 << 40
    assert job["start_by_us"] - job["created_us"] == 60_000_000
    with store.read() as conn:
        assert [(e["type"], e["data"]) for e in events.after(conn, stored.job_id, 0)] == [
            ("state", '{"state":"queued"}')
        ]


def test_an_unknown_id_is_none(store: Store) -> None:
    with store.read() as conn:
        assert jobs.get(conn, "no such job") is None
        assert jobs.state_of(conn, "no such job") is None
        assert jobs.states_of(conn, ["no such job"]) == {}
        assert events.latest(conn, ["no such job"]) == {}


def test_a_job_reads_the_same_until_something_happens_to_it(store: Store) -> None:
    """What the ETag is made of."""
    host = up(store)
    [job_id] = submit(store)
    versions = [row(store, job_id)]

    def changed() -> bool:
        versions.append(row(store, job_id))
        return versions[-1] != versions[-2]

    assert not changed()
    claimed = claim(store, host)
    assert changed()
    with store.write() as conn:
        leases.renew(conn, host.name, host.incarnation, 60)
    assert not changed()  # a heartbeat is nobody's news
    with store.write() as conn:
        leases.progress(conn, claimed.holder, {"done": 1})
    assert changed()
    with store.write() as conn:
        jobs.cancel(conn, job_id)
    assert changed()
    with store.write() as conn:
        leases.finish(conn, claimed.holder, State.succeeded, result="{}")
    assert changed()
    assert not changed()


class TestIdempotency:
    def test_the_same_key_and_body_is_the_same_job(self, store: Store) -> None:
        [first] = accept(store, keyed("k"))
        [second] = accept(store, keyed("k"))
        assert second == Stored(first.job_id, created=False)
        with store.read() as conn:
            assert len(jobs.page(conn)) == 1

    def test_the_same_key_with_another_body_stores_nothing(self, store: Store) -> None:
        [first] = accept(store, keyed("k", seed=1))
        [second] = accept(store, keyed("k", seed=2))
        assert second == Stored(first.job_id, created=False, key_reused=True)
        with store.read() as conn:
            assert len(jobs.page(conn)) == 1

    def test_keys_within_one_batch(self, store: Store) -> None:
        batch = [keyed("k"), keyed("k"), keyed("k", seed=7), keyed("l"), NewJob.of(spec())]
        outcome = accept(store, *batch)
        assert [(o.created, o.key_reused) for o in outcome] == [
            (True, False),
            (False, False),
            (False, True),
            (True, False),
            (True, False),
        ]
        assert outcome[0].job_id == outcome[1].job_id == outcome[2].job_id
        with store.read() as conn:
            assert len(jobs.page(conn)) == 3

    def test_the_default_spelled_out_is_the_same_body(self, store: Store) -> None:
        [first] = accept(store, keyed("k"))
        [second] = accept(store, keyed("k", seed=0))
        assert second.job_id == first.job_id

    def test_many_writers_at_once_with_the_same_keys_in_any_order(self, database_url: str) -> None:
        """Separate engines, as separate processes have: no error, no deadlock, one job a key."""
        keys = [f"key {i}" for i in range(5)]
        writers = 8
        start = threading.Barrier(writers)

        def write(number: int) -> list[Stored]:
            store = Store(database_url)
            try:
                order = keys[number % 5 :] + keys[: number % 5]
                batch = [keyed(key) for key in (order if number % 2 else order[::-1])]
                start.wait()
                return accept(store, *batch)
            finally:
                store.dispose()

        # When
        with ThreadPoolExecutor(writers) as pool:
            outcomes = [stored for batch in pool.map(write, range(writers)) for stored in batch]
        # Then
        assert sum(stored.created for stored in outcomes) == len(keys)
        assert len({stored.job_id for stored in outcomes}) == len(keys)
        store = Store(database_url)
        with store.read() as conn:
            assert conn.scalar(select(func.count()).select_from(jobs_table)) == len(keys)
            assert conn.scalar(select(func.count()).select_from(idempotency_keys)) == len(keys)
        store.dispose()


class TestPage:
    def walk(self, store: Store, limit: int, between: Callable[[], object] = lambda: None, **filters: Any) -> list[str]:
        """All ids, page by page; `between` runs after each page."""
        seen: list[str] = []
        while True:
            with store.read() as conn:
                items = jobs.page(conn, limit=limit, before=seen[-1] if seen else None, **filters)
            seen += [item["id"] for item in items]
            if len(items) < limit:
                return seen
            between()

    @pytest.fixture
    def ids(self, store: Store) -> dict[str, list[str]]:
        """Jobs in several states, kinds and labels, in an order that mixes them."""
        host = up(store, cpu=64)
        found: dict[str, list[str]] = {"all": [], "red": [], "other": []}
        for i in range(30):
            [job_id] = submit(store, labels={"colour": "red" if i % 3 == 0 else "blue", "n": str(i)})
            found["all"].append(job_id)
            if i % 3 == 0:
                found["red"].append(job_id)
            if i % 2:
                claim(store, host)  # of the earliest that is queued
        with store.write() as conn:
            for job_id in found["all"][20:24]:
                conn.execute(jobs_table.update().where(jobs_table.c.id == job_id).values(kind="other"))
                found["other"].append(job_id)
        return {name: sorted(values, reverse=True) for name, values in found.items()}

    @pytest.mark.parametrize("limit", [1, 4, 7, 50])
    def test_pages_are_whole_and_newest_first(self, store: Store, ids: dict[str, list[str]], limit: int) -> None:
        states = {job_id: state(store, job_id) for job_id in ids["all"]}
        queued = [job_id for job_id in ids["all"] if states[job_id] == "queued"]
        running = [job_id for job_id in ids["all"] if states[job_id] == "running"]
        assert len(queued) == len(running) == 15
        assert self.walk(store, limit) == ids["all"]
        assert self.walk(store, limit, states=["queued"]) == queued
        assert self.walk(store, limit, states=["running", "queued", "running"]) == ids["all"]
        assert self.walk(store, limit, states=["failed", "expired"]) == []
        assert self.walk(store, limit, kind="other") == ids["other"]
        assert self.walk(store, limit, kind="none") == []
        assert self.walk(store, limit, label=("colour", "red")) == ids["red"]
        assert self.walk(store, limit, label=("colour", "green")) == []
        both = [job_id for job_id in ids["other"] if job_id in queued]
        assert self.walk(store, limit, kind="other", states=["queued"]) == both
        mixed = [job_id for job_id in ids["red"] if job_id in ids["other"] and job_id in queued]
        assert self.walk(store, limit, kind="other", states=["queued"], label=("colour", "red")) == mixed

    def test_jobs_that_arrive_meanwhile_neither_hide_nor_double_any(
        self, store: Store, ids: dict[str, list[str]]
    ) -> None:
        arriving = lambda: submit(store, labels={"colour": "red"})  # noqa: E731
        assert self.walk(store, 4, arriving) == ids["all"]
        assert self.walk(store, 4, arriving, label=("colour", "red"))[-len(ids["red"]) :] == ids["red"]

    def test_a_row_of_a_list_has_no_result(self, store: Store) -> None:
        host = up(store)
        submit(store)
        with store.write() as conn:
            leases.finish(conn, leases_claim(conn, host), State.succeeded, result='{"schema":1}')
        with store.read() as conn:
            [item] = jobs.page(conn)
        assert "result" not in item
        assert item["state"] == "succeeded"
        assert row(store, item["id"])["result"] == '{"schema":1}'


def leases_claim(conn: Any, host: hosts.Host) -> leases.Holder:
    claimed = claims.claim(conn, host, 30)
    assert claimed is not None
    return claimed.holder


def ahead_of(conn: Connection, job_id: str) -> int:
    found = jobs.get(conn, job_id)
    assert found is not None
    return jobs.ahead_of(conn, job_id, found["rank_us"])


class TestPosition:
    def test_by_priority_then_by_arrival(self, store: Store) -> None:
        [low] = submit(store, priority="low")
        [normal, later] = submit(store, 2)
        [high] = submit(store, priority="high")
        with store.read() as conn:
            ahead = [ahead_of(conn, job_id) for job_id in (high, normal, later, low)]
        assert ahead == [0, 1, 2, 3]

    def test_only_queued_jobs_count(self, store: Store) -> None:
        [first, second, third] = submit(store, 3)
        claim(store, up(store))
        with store.write() as conn:
            jobs.cancel(conn, second)
        with store.read() as conn:
            assert ahead_of(conn, third) == 0
        assert state(store, first) == "running"

    def test_it_is_counted_up_to_a_limit(self, store: Store) -> None:
        new = [NewJob.of(spec(priority="high" if i % 2 else "normal")) for i in range(2 * jobs.MOST_AHEAD)]
        last = NewJob.of(spec())
        accept(store, *new, last)
        with store.read() as conn:
            assert ahead_of(conn, last.job_id) == jobs.MOST_AHEAD
            assert ahead_of(conn, new[1].job_id) == 0


class TestCancel:
    def test_queued_ends_at_once_and_is_never_claimed(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        with store.write() as conn:
            assert jobs.cancel(conn, job_id) == "canceled"
            assert claims.claim(conn, host, 30) is None
        assert row(store, job_id)["finished_us"] is not None

    def test_running_becomes_canceling_and_asking_again_is_harmless(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        claimed = claim(store, host)
        with store.write() as conn:
            assert jobs.cancel(conn, job_id) == "canceling"
            assert jobs.cancel(conn, job_id) == "canceling"
            assert leases.held(conn, host.name, host.incarnation) == {(job_id, 1): "canceling"}
        # When the process is gone, whatever it said at the end
        with store.write() as conn:
            assert leases.finish(conn, claimed.holder, State.succeeded, result='{"partial":true}') == "canceled"
        # Then
        job = row(store, job_id)
        assert (job["state"], job["result"], job["error"]) == ("canceled", '{"partial":true}', None)
        assert job["attempts"][0]["outcome"] == "canceled"
        with store.read() as conn:
            told = [e["data"] for e in events.after(conn, job_id, 0)]
        assert [data.split('"')[3] for data in told] == ["queued", "running", "canceling", "canceled"]

    @pytest.mark.parametrize("end", [State.succeeded, State.failed, State.canceled])
    def test_what_has_ended_refuses(self, store: Store, end: State) -> None:
        host = up(store)
        [job_id] = submit(store)
        claimed = claim(store, host)
        with store.write() as conn:
            leases.finish(conn, claimed.holder, end)
        with store.write() as conn, pytest.raises(Conflict, match=f"it is {end}"):
            jobs.cancel(conn, job_id)
        assert state(store, job_id) == end

    def test_unknown_is_none(self, store: Store) -> None:
        with store.write() as conn:
            assert jobs.cancel(conn, "no such job") is None


class TestCapacity:
    def living(self, store: Store, *registered: hosts.Host) -> list[dict[str, Any]]:
        with store.write() as conn:
            for host in registered:
                hosts.register(conn, host)
            return hosts.living(conn, 30)

    @pytest.mark.parametrize(
        ("wanted", "memory_bytes", "pointer"),
        [
            (spec(count=4), 0, None),
            (spec(count=5), 0, "/devices/count"),
            (spec(device_type="cuda", count=2), 0, None),
            (spec(device_type="cuda", count=3), 0, "/devices/count"),
            (spec(device_type="auto", count=4), 0, None),  # on CPU devices: no host has 4 GPUs
            (spec(device_type="auto", count=5), 0, "/devices/count"),
            (spec(), 8 << 30, None),
            (spec(), 9 << 30, "/model"),
            (spec(device_type="cuda"), 2 << 30, "/model"),  # the host with enough memory has no GPU
            (spec(device_type="auto"), 2 << 30, None),  # on CPU devices: the host with GPUs has no room
            (spec(device_type="auto"), 9 << 30, "/model"),
        ],
    )
    def test_what_no_host_could_run_is_refused(
        self, store: Store, wanted: BaseSpec, memory_bytes: int, pointer: str | None
    ) -> None:
        living = self.living(
            store, a_host("a", cpu=4, memory_bytes=8 << 30), a_host("b", cpu=0, cuda=2, memory_bytes=1 << 30)
        )
        if pointer is None:
            jobs.check_capacity(wanted, memory_bytes, living)
        else:
            with pytest.raises(InvalidRequest) as refused:
                jobs.check_capacity(wanted, memory_bytes, living)
            assert [error["pointer"] for error in refused.value.errors] == [pointer]

    def test_without_hosts_everything_may_wait(self, store: Store) -> None:
        jobs.check_capacity(spec(count=1000), 1 << 50, self.living(store))

    def test_no_host_has_the_type_at_all(self, store: Store) -> None:
        with pytest.raises(InvalidRequest, match="no registered host has a cuda device"):
            jobs.check_capacity(spec(device_type="cuda"), 0, self.living(store, a_host()))


class TestIds:
    def test_they_ascend_whichever_thread_asks(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            batches = list(pool.map(lambda _: [new_id() for _ in range(2000)], range(8)))
        assert all(batch == sorted(batch) for batch in batches)
        assert len({job_id for batch in batches for job_id in batch}) == 16_000

    def test_a_burst_does_not_run_ahead_of_the_clock(self) -> None:
        """Ids of two processes sort by time only if neither's run ahead."""
        import time

        for _ in range(20_000):
            last = new_id()
        ahead_ms = int(last.replace("-", "")[:12], 16) - time.time_ns() // 1_000_000
        assert ahead_ms <= 1

    def test_they_are_version_7(self) -> None:
        from uuid import UUID

        assert UUID(new_id()).version == 7
        assert UUID(new_id()).variant == "specified in RFC 4122"
