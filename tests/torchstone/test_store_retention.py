"""What is deleted, what is kept by age and by size; bytes which a job names, or is about to, are never lost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from tests.torchstone.store_samples import a_host, claim, let_leases_end, reconcile, spec, submit, up
from torchstone.errors import Conflict
from torchstone.jobs import State
from torchstone.settings import Settings
from torchstone.store import Store, artifacts, events, jobs, leases, logs, retention
from torchstone.store.artifacts import Blobs
from torchstone.store.jobs import NewJob
from torchstone.store.leases import Holder
from torchstone.store.retention import Pin
from torchstone.store.schema import deleted_jobs, idempotency_keys, loose_blobs, metadata, now_us, removals
from torchstone.store.schema import jobs as jobs_table

DAY_US = 86_400 * 1_000_000


class Shelf:
    """A store, an artifact folder, a host that runs jobs which leave files behind."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.blobs = Blobs((folder / "blobs").as_uri())
        self.host = up(store, cpu=8)

    def run(self, *contents: bytes) -> str:
        """A job that ends with these files."""
        submit(self.store)
        holder = claim(self.store, self.host).holder
        self.end(holder, *contents)
        return holder.job_id

    def pin(self, holder: Holder, *contents: bytes) -> retention.Pin:
        with self.store.write() as conn:
            return retention.pin(conn, holder, [hashlib.sha256(data).hexdigest() for data in contents])

    def put(self, *contents: bytes) -> list[dict[str, Any]]:
        rows = []
        for number, data in enumerate(contents):
            path = self.folder / "file"
            path.write_bytes(data)
            sha256, size = self.blobs.put(path)
            rows.append({"name": f"{number}", "media_type": "x/y", "bytes": size, "sha256": sha256})
        return rows

    def end(self, holder: Holder, *contents: bytes) -> None:
        assert self.pin(holder, *contents) is Pin.held
        rows = self.put(*contents)
        with self.store.write() as conn:
            assert leases.finish(conn, holder, State.succeeded, result="{}", files=rows)

    def has(self, data: bytes) -> bool:
        return self.blobs.size(hashlib.sha256(data).hexdigest()) == len(data)

    def delete(self, job_id: str) -> bool:
        with self.store.write() as conn:
            return retention.delete_job(conn, job_id, "deleted on request")

    def collect(self, **settings: Any) -> retention.Collected:
        return retention.collect(self.store, self.blobs, Settings(data=self.folder, **settings))

    def is_there(self, job_id: str) -> bool:
        with self.store.read() as conn:
            return jobs.get(conn, job_id) is not None

    def ended_days_ago(self, job_id: str, days: float) -> None:
        with self.store.write() as conn:
            then_us = now_us() - int(days * DAY_US)
            conn.execute(update(jobs_table).where(jobs_table.c.id == job_id).values(finished_us=then_us))


@pytest.fixture
def shelf(store: Store, tmp_path: Path) -> Shelf:
    return Shelf(store, tmp_path)


def test_a_deleted_job_leaves_nothing_but_its_epitaph(shelf: Shelf) -> None:
    # Given a job with all that can belong to one
    new = NewJob.of(spec(labels={"a": "b"}), idempotency_key="k")
    with shelf.store.write() as conn:
        jobs.insert_many(conn, [new])
    holder = claim(shelf.store, shelf.host).holder
    with shelf.store.write() as conn:
        logs.append(conn, holder.job_id, 1, [(0, "words")])
    shelf.end(holder, b"bytes")
    # When it is deleted, and what was let go is collected
    assert shelf.delete(holder.job_id)
    assert shelf.collect().blobs == 1
    # Then no table knows it but that of the dead, and a second time there is nothing to delete
    with shelf.store.read() as conn:
        left = {name for name, table in metadata.tables.items() if conn.scalar(select(func.count()).select_from(table))}
        epitaph = retention.epitaph(conn, holder.job_id)
    assert left == {"hosts", "deleted_jobs"}
    assert epitaph is not None and epitaph.startswith("deleted on request, 20")
    assert not shelf.has(b"bytes")
    assert not shelf.delete(holder.job_id)


@pytest.mark.parametrize("state", ["queued", "running", "canceling"])
def test_a_job_that_has_not_ended_is_not_deleted(shelf: Shelf, state: str) -> None:
    [job_id] = submit(shelf.store)
    if state != "queued":
        claim(shelf.store, shelf.host)
    if state == "canceling":
        with shelf.store.write() as conn:
            jobs.cancel(conn, job_id)
    with pytest.raises(Conflict, match=f"the job is {state}"):
        shelf.delete(job_id)
    assert shelf.is_there(job_id)


def test_bytes_that_another_job_names_stay(shelf: Shelf) -> None:
    first, second = shelf.run(b"shared", b"first's own"), shelf.run(b"shared")
    shelf.delete(first)
    shelf.collect()
    assert shelf.has(b"shared") and not shelf.has(b"first's own")
    shelf.delete(second)
    shelf.collect()
    assert not shelf.has(b"shared")


def test_bytes_that_a_running_attempt_is_about_to_name_stay(shelf: Shelf) -> None:
    # Given bytes in the store, and an attempt that found them there and did not store them again
    first = shelf.run(b"shared")
    submit(shelf.store)
    running = claim(shelf.store, shelf.host).holder
    assert shelf.pin(running, b"shared") is Pin.held
    # When the only job that names them is deleted, however often is collected
    shelf.delete(first)
    assert shelf.collect().blobs == shelf.collect().blobs == 0
    # Then they are still there when the attempt names them
    with shelf.store.write() as conn:
        leases.finish(conn, running, State.succeeded, files=shelf.put(b"shared"))
    shelf.collect()
    assert shelf.has(b"shared")
    with shelf.store.read() as conn:
        assert conn.scalar(select(func.count()).select_from(loose_blobs)) == 0


def test_what_a_lost_attempt_stored_is_removed_and_its_pins_count_no_more(shelf: Shelf) -> None:
    submit(shelf.store)
    lost = claim(shelf.store, shelf.host).holder
    assert shelf.pin(lost, b"half of a result") is Pin.held
    shelf.put(b"half of a result")
    with shelf.store.write() as conn:
        let_leases_end(conn, shelf.host.name)
    assert reconcile(shelf.store) == [lost.job_id]
    assert shelf.pin(lost, b"too late") is Pin.lost
    assert shelf.collect().blobs == 1
    assert not shelf.has(b"half of a result")


def test_a_removal_and_a_pin_of_the_same_bytes_take_turns(shelf: Shelf) -> None:
    """Whoever pins while bytes are being removed is told to wait, and then finds that they are gone, not there."""
    first = shelf.run(b"shared")
    submit(shelf.store)
    running = claim(shelf.store, shelf.host).holder
    shelf.delete(first)

    def remove(sha256: str) -> None:
        assert shelf.pin(running, b"shared") is Pin.wait
        with shelf.store.write():
            pass  # nor is any transaction open meanwhile: a bucket may take its time
        assert not retention.remove_loose(shelf.store, sha256, remove), "two at the same bytes"
        shelf.blobs.delete(sha256)

    assert retention.remove_loose(shelf.store, hashlib.sha256(b"shared").hexdigest(), remove)
    assert shelf.pin(running, b"shared") is Pin.held and not shelf.has(b"shared")


def test_bytes_stored_for_a_job_that_was_taken_away_are_found(shelf: Shelf) -> None:
    submit(shelf.store)
    running = claim(shelf.store, shelf.host).holder
    assert shelf.pin(running, b"late") is Pin.held
    with shelf.store.write() as conn:
        leases.give_back(conn, running, "lost", spent=True, max_attempts=3)
    assert shelf.collect().blobs == 1  # the pin is over, and its note gone
    [row] = shelf.put(b"late")
    assert shelf.collect().blobs == 0
    with shelf.store.write() as conn:
        retention.leave(conn, running, [row["sha256"]])
    assert shelf.collect().blobs == 1 and not shelf.has(b"late")


def test_jobs_are_kept_for_so_many_days(shelf: Shelf) -> None:
    old, young = shelf.run(b"old"), shelf.run(b"young")
    [waiting] = submit(shelf.store)
    shelf.ended_days_ago(old, 31)
    shelf.ended_days_ago(young, 29)
    assert shelf.collect() == retention.Collected([], 0), "by default nothing is deleted"
    assert shelf.collect(keep_days=30) == retention.Collected([old], 1)
    assert shelf.is_there(young) and shelf.is_there(waiting)


def test_the_oldest_go_until_the_rest_is_small_enough(shelf: Shelf) -> None:
    # Given 10 + 10 + 10 bytes, of which the first two jobs share ten
    ids = [shelf.run(b"a" * 10), shelf.run(b"a" * 10), shelf.run(b"b" * 10), shelf.run(b"c" * 10), shelf.run()]
    for age, job_id in enumerate(reversed(ids)):
        shelf.ended_days_ago(job_id, age)
    assert shelf.collect(keep_artifact_bytes=30).job_ids == []
    # When 20 may be kept, then both that name the oldest bytes go, and only they
    assert shelf.collect(keep_artifact_bytes=20) == retention.Collected(ids[:2], 1)
    assert shelf.collect(keep_artifact_bytes=20).job_ids == []
    assert shelf.collect(keep_artifact_bytes=0) == retention.Collected(ids[2:4], 2)
    assert shelf.is_there(ids[4]), "a job without files is not large"


def test_keys_and_epitaphs_are_forgotten_after_their_time(shelf: Shelf) -> None:
    shelf.delete(shelf.run())
    with shelf.store.write() as conn:
        jobs.insert_many(conn, [NewJob.of(spec(), idempotency_key="k")])
    for days, left in ((7, 1), (1e-9, 0)):
        shelf.collect(keep_keys_days=days)
        with shelf.store.read() as conn:
            assert conn.scalar(select(func.count()).select_from(idempotency_keys)) == left
    with shelf.store.write() as conn:
        conn.execute(update(deleted_jobs).values(deleted_us=now_us() - 91 * DAY_US))
    shelf.collect()
    with shelf.store.read() as conn:
        assert conn.scalar(select(func.count()).select_from(deleted_jobs)) == 0


def test_bytes_that_cannot_be_removed_are_tried_again(shelf: Shelf) -> None:
    shelf.delete(shelf.run(b"stubborn"))
    sha256, delete = hashlib.sha256(b"stubborn").hexdigest(), shelf.blobs.delete

    def refuse(_: str) -> None:
        raise OSError("the bucket is away")

    shelf.delete(shelf.run(b"other"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelf.blobs, "delete", lambda name: refuse(name) if name == sha256 else delete(name))
        assert shelf.collect().blobs == 1, "one that cannot be removed is in the way of no other"
    assert shelf.has(b"stubborn") and not shelf.has(b"other")
    # The bucket may have heard of it all the same: nobody names these bytes until that cannot be any more
    assert shelf.collect().blobs == 0
    with shelf.store.write() as conn:
        conn.execute(update(removals).values(since_us=now_us() - retention.REMOVED_WITHIN_S * 1_000_001))
    assert shelf.collect().blobs == 1 and not shelf.has(b"stubborn")


def test_deleting_and_looking_at_once_never_breaks(shelf: Shelf) -> None:
    """Whatever is asked about a job while it is deleted: the answer is that of before or of after."""
    job_id = shelf.run(b"x")
    asked: list[Callable[[Any], object]] = [
        lambda conn: jobs.get(conn, job_id),
        lambda conn: artifacts.all_of(conn, job_id),
        lambda conn: events.after(conn, job_id, 0),
        lambda conn: logs.read(conn, job_id),
    ]
    with shelf.store.read() as reading:
        before = [ask(reading) for ask in asked]
        shelf.delete(job_id)
        assert [ask(reading) for ask in asked] == before
    with shelf.store.read() as conn:
        assert [ask(conn) for ask in asked] == [None, [], [], []]


def test_a_host_that_runs_anew_finds_its_name_free(shelf: Shelf) -> None:
    """The tables of leases hold nothing of a deleted job that could stand in the way of a claim."""
    shelf.delete(shelf.run(b"x"))
    submit(shelf.store)
    assert claim(shelf.store, a_host(cpu=8)).holder.attempt == 1
