"""Bytes that are being removed while others want them or let them go: nothing is lost, leaked or stuck."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import event, insert, update

from tests.torchstone.processes import wait_until
from tests.torchstone.store_samples import claim, submit
from tests.torchstone.test_store_retention import Shelf
from torchstone.errors import Unavailable
from torchstone.jobs import State
from torchstone.settings import Settings
from torchstone.store import Store, checkpoints, leases, retention
from torchstone.store.leases import Holder
from torchstone.store.retention import Pin
from torchstone.store.schema import loose_blobs, removals
from worker.checkpoints import release

SAME = b"same"
SHA256 = hashlib.sha256(SAME).hexdigest()


@pytest.fixture
def shelf(store: Store, tmp_path: Path) -> Shelf:
    return Shelf(store, tmp_path)


def let_pass(shelf: Shelf, seconds: float) -> None:
    """Every removal was noted so much longer ago."""
    with shelf.store.write() as conn:
        conn.execute(update(removals).values(since_us=removals.c.since_us - int(seconds * 1_000_000)))


def an_attempt(shelf: Shelf) -> Holder:
    submit(shelf.store)
    return claim(shelf.store, shelf.host).holder


class Refuses:
    """A bucket that lets nobody delete."""

    def delete(self, sha256: str) -> None:
        raise PermissionError("AccessDenied: s3:DeleteObject")


def test_bytes_whose_removal_is_refused_can_be_stored_again(shelf: Shelf) -> None:
    assert shelf.delete(shelf.run(SAME))
    holder = an_attempt(shelf)
    retention.collect(shelf.store, Refuses(), Settings(data=shelf.folder))  # type: ignore[arg-type]
    assert shelf.pin(holder, SAME) is Pin.wait  # it may still be under way
    let_pass(shelf, retention.REMOVED_WITHIN_S + 1)
    # A round that comes first does not begin anew: somebody waits for these bytes.
    retention.collect(shelf.store, Refuses(), Settings(data=shelf.folder))  # type: ignore[arg-type]
    assert shelf.pin(holder, SAME) is Pin.held


def test_a_bucket_that_does_not_answer_is_not_waited_for_once_a_blob(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shelf.delete(shelf.run(*(b"%d" % number for number in range(10))))
    seconds, asked = [0.0], []

    class Hangs:
        def delete(self, sha256: str) -> None:
            asked.append(sha256)
            seconds[0] += 15
            raise Unavailable("no answer within 15 s")

    monkeypatch.setattr(retention.time, "monotonic", lambda: seconds[0])
    retention.collect(shelf.store, Hangs(), Settings(data=shelf.folder))  # type: ignore[arg-type]
    assert len(asked) == 2


def test_a_removal_noted_before_the_clock_was_set_back_is_done_again(shelf: Shelf) -> None:
    assert shelf.delete(shelf.run(SAME))
    retention.collect(shelf.store, Refuses(), Settings(data=shelf.folder))  # type: ignore[arg-type]
    let_pass(shelf, -86_400)
    assert shelf.collect().blobs == 1
    assert not shelf.has(SAME)


def test_who_took_too_long_forgets_only_what_he_noted(shelf: Shelf) -> None:
    """The first remover is slow, a second takes over, the first ends: the bytes are still the second one's."""
    assert shelf.delete(shelf.run(SAME))
    holder = an_attempt(shelf)
    first_goes, second_is_at_it, second_goes = (threading.Event() for _ in range(3))

    def second(sha256: str) -> None:
        second_is_at_it.set()
        assert second_goes.wait(30)

    def start(remove: Callable[[str], object]) -> threading.Thread:
        thread = threading.Thread(target=retention.remove_loose, args=(shelf.store, SHA256, remove))
        thread.start()
        return thread

    first_is_at_it = threading.Event()

    def first(sha256: str) -> None:
        first_is_at_it.set()
        assert first_goes.wait(30)

    slow = start(first)
    assert first_is_at_it.wait(30)
    let_pass(shelf, retention.REMOVED_WITHIN_S + 1)
    other = start(second)
    assert second_is_at_it.wait(30)
    first_goes.set()
    slow.join(30)
    try:
        assert shelf.pin(holder, SAME) is Pin.wait
    finally:
        second_goes.set()
        other.join(30)
    assert shelf.pin(holder, SAME) is Pin.held


def test_who_stood_still_after_noting_removes_nothing(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shelf.delete(shelf.run(SAME))
    clock = iter([0.0, float(retention.REMOVED_WITHIN_S)])
    monkeypatch.setattr(retention.time, "monotonic", lambda: next(clock))
    assert not retention.remove_loose(shelf.store, SHA256, shelf.blobs.delete)
    assert shelf.has(SAME)


def test_more_loose_bytes_than_a_statement_takes_parameters(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    if shelf.store.is_sqlite:  # what SQLite itself allows; Debian's allows more

        @event.listens_for(shelf.store.engine, "connect")
        def _limit(connection, _record) -> None:  # type: ignore[no-untyped-def]
            connection.setlimit(9, 32_766)

        shelf.store.engine.dispose()
    count = 33_000 if shelf.store.is_sqlite else 66_000
    with shelf.store.write() as conn:
        rows = [{"sha256": f"{number:064x}", "job_id": "gone", "attempt": 0} for number in range(count)]
        conn.execute(insert(loose_blobs), rows)
    monkeypatch.setattr(retention, "remove_loose", lambda *what: True)
    assert shelf.collect().blobs == count


def test_deleting_trainings_beside_the_workers_that_release_their_checkpoints(shelf: Shelf) -> None:
    job_ids = []
    for number in range(40):
        data = f"checkpoint {number}".encode()
        holder = an_attempt(shelf)
        assert shelf.pin(holder, data) is Pin.held
        [row] = shelf.put(data)
        with shelf.store.write() as conn:
            assert checkpoints.replace(conn, holder, [("ddp", row["sha256"], row["bytes"])]) == []
        with shelf.store.write() as conn:
            assert leases.finish(conn, holder, State.succeeded, result="{}")
        job_ids.append(holder.job_id)
    errors: list[BaseException] = []
    over = threading.Event()

    def release_all() -> None:
        while not over.is_set():
            try:
                release(shelf.store, shelf.blobs)
            except Exception as error:
                errors.append(error)

    def delete_some(some: list[str]) -> None:
        for job_id in some:
            try:
                shelf.delete(job_id)
            except Exception as error:
                errors.append(error)

    releasers = [threading.Thread(target=release_all) for _ in range(2)]
    deleters = [threading.Thread(target=delete_some, args=(job_ids[part::2],)) for part in range(2)]
    for thread in (*releasers, *deleters):
        thread.start()
    for thread in deleters:
        thread.join(120)
    over.set()
    for thread in releasers:
        thread.join(120)
    assert errors == []
    wait_until(lambda: shelf.collect().blobs == 0, within_s=30)
    assert not any(shelf.has(f"checkpoint {number}".encode()) for number in range(40))
