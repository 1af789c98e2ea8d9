"""Two transactions at the same job, machine or lease: every order of events ends well, with no deadlock.

On PostgreSQL the second one waits for the first one's row, and must then see what became of it. On SQLite it waits
before it begins, and the same must hold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from tests.torchstone.store_samples import LEASE_S, a_host, row, silent_holder, state, submit, up
from torchstone.errors import Conflict
from torchstone.jobs import State
from torchstone.store import Store, claims, events, hosts, jobs, leases
from torchstone.store.leases import Holder
from torchstone.store.schema import events as events_table
from torchstone.store.schema import jobs as jobs_table
from torchstone.store.schema import placements


class Second:
    """A transaction in a thread of its own, which meets the lock of the one that is open here."""

    def __init__(self, store: Store, work: Callable[[Connection], Any]) -> None:
        self.store = store
        self.result: Any = None
        self.error: Exception | None = None
        self.begun = threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            if self.store.is_sqlite:
                self.begun.set()
            with self.store.write() as conn:
                self.begun.set()
                self.result = self._work(conn)
        except Exception as error:
            self.error = error

    def start_and_meet_the_lock(self) -> None:
        self._thread.start()
        self.begun.wait(30)
        deadline_s = time.monotonic() + 30
        while self._thread.is_alive() and not self.store.is_sqlite and not self._waits():
            assert time.monotonic() < deadline_s

    def _waits(self) -> bool:
        waiting = text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        with self.store.read() as conn:
            return bool(conn.scalar(waiting))

    def end(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


@contextmanager
def meanwhile(
    store: Store, first: Callable[[Connection], Any], second: Callable[[Connection], Any]
) -> Iterator[Second]:
    """`first` has written and not committed when `second` starts; then it commits, and `second` has ended."""
    other = Second(store, second)
    with store.write() as conn:
        first(conn)
        other.start_and_meet_the_lock()
    other._thread.join(30)
    yield other


@pytest.fixture
def running(store: Store) -> Holder:
    """The holder of a job whose lease has just ended, unnoticed."""
    return silent_holder(store)


def reconcile(conn: Connection) -> list[Holder]:
    return leases.reconcile(conn, max_attempts=3, ring_again_s=60)[0]


def test_a_job_that_just_ended_is_not_taken_back(store: Store, running: Holder) -> None:
    with meanwhile(store, lambda conn: leases.finish(conn, running, State.succeeded, result="{}"), reconcile) as other:
        assert other.end() == []
    assert state(store, running.job_id) == "succeeded"


def test_a_job_that_was_just_taken_back_is_not_ended(store: Store, running: Holder) -> None:
    finish = lambda conn: leases.finish(conn, running, State.succeeded, result="{}")  # noqa: E731
    with meanwhile(store, reconcile, finish) as other:
        assert other.end() is None
    job = row(store, running.job_id)
    assert (job["state"], job["result"]) == ("queued", None)


def test_a_lease_that_was_just_renewed_is_not_taken_back(store: Store, running: Holder) -> None:
    renew = lambda conn: leases.renew(conn, running.host, running.incarnation, LEASE_S)  # noqa: E731
    with meanwhile(store, renew, reconcile) as other:
        assert other.end() == []
    assert state(store, running.job_id) == "running"


def test_a_lease_that_was_just_taken_back_is_not_renewed(store: Store, running: Holder) -> None:
    renew = lambda conn: leases.renew(conn, running.host, running.incarnation, LEASE_S)  # noqa: E731
    with meanwhile(store, reconcile, renew) as other:
        assert other.end() is True  # the host lives; only that lease is gone
    with store.read() as conn:
        assert leases.held(conn, running.host, running.incarnation) == {}
        assert conn.scalar(select(placements.c.released_us)) is not None


def test_a_restart_does_not_take_back_what_just_ended(store: Store, running: Holder) -> None:
    take_back = lambda conn: leases.take_back_from(conn, running.host, "2", "r", max_attempts=3)  # noqa: E731
    with meanwhile(store, lambda conn: leases.finish(conn, running, State.failed), take_back) as other:
        assert other.end() == []
    assert state(store, running.job_id) == "failed"


def test_cancelling_while_it_is_claimed(store: Store) -> None:
    host = up(store)
    [job_id] = submit(store)
    claim = lambda conn: claims.claim(conn, host, LEASE_S)  # noqa: E731
    with meanwhile(store, claim, lambda conn: jobs.cancel(conn, job_id)) as other:
        assert other.end() == "canceling"
    assert state(store, job_id) == "canceling"


def test_claiming_while_it_is_cancelled_takes_the_next(store: Store) -> None:
    host = up(store)
    first, second = submit(store, 2)
    claim = lambda conn: claims.claim(conn, host, LEASE_S)  # noqa: E731
    with meanwhile(store, lambda conn: jobs.cancel(conn, first), claim) as other:
        assert other.end().holder.job_id == second
    assert state(store, first) == "canceled"


@pytest.mark.parametrize("backend", ["postgresql"])
def test_a_claim_that_came_too_late_lets_go_of_the_job(database_url: str) -> None:
    """Else it would hold one job while it waits for another: half of a deadlock."""
    store, hasty = Store(database_url), Store(database_url, busy_timeout_s=0.5)
    host = up(store)
    first, second = submit(store, 2)
    looked = threading.Event()
    told = threading.Event()

    def claim_and_stay(conn: Connection) -> str:
        claimed = claims.claim(conn, host, LEASE_S)
        assert claimed is not None
        looked.set()
        told.wait(30)
        return claimed.holder.job_id

    other = Second(store, claim_and_stay)
    with store.write() as conn:
        jobs.cancel(conn, first)
        other.start_and_meet_the_lock()
    looked.wait(30)
    try:
        with hasty.write() as conn:
            conn.execute(select(jobs_table.c.id).where(jobs_table.c.id == first).with_for_update())
    finally:
        told.set()
        assert other.end() == second
        store.dispose()
        hasty.dispose()


def test_cancelling_while_it_is_taken_back(store: Store, running: Holder) -> None:
    """It must not be told that a queued job has already ended."""
    with meanwhile(store, reconcile, lambda conn: jobs.cancel(conn, running.job_id)) as other:
        assert other.end() == "canceled"
    assert state(store, running.job_id) == "canceled"


def test_cancelling_while_it_ends(store: Store, running: Holder) -> None:
    finish = lambda conn: leases.finish(conn, running, State.succeeded)  # noqa: E731
    with meanwhile(store, finish, lambda conn: jobs.cancel(conn, running.job_id)) as other, pytest.raises(Conflict):
        other.end()
    assert state(store, running.job_id) == "succeeded"


def test_ending_while_it_is_cancelled(store: Store, running: Holder) -> None:
    finish = lambda conn: leases.finish(conn, running, State.succeeded)  # noqa: E731
    with meanwhile(store, lambda conn: jobs.cancel(conn, running.job_id), finish) as other:
        assert other.end() is State.canceled


def test_two_workers_of_one_machine_claim_different_jobs_at_once(store: Store) -> None:
    """Neither waits for the other's job, so it is the machine that they must take turns at."""
    big = up(store, "big", cpu=1, machine="m", memory_bytes=4 << 30)
    small = up(store, "small", cpu=1, machine="m", memory_bytes=1 << 30)
    only_big, _ = submit(store, 2)
    with store.write() as conn:
        conn.execute(jobs_table.update().where(jobs_table.c.id == only_big).values(memory_bytes=2 << 30))
    with meanwhile(
        store, lambda conn: claims.claim(conn, big, LEASE_S), lambda conn: claims.claim(conn, small, LEASE_S)
    ) as other:
        assert other.end() is None  # cpu:0 is taken
    assert state(store, only_big) == "running"


def test_two_machines_claim_at_once(store: Store) -> None:
    """The second one does not go home because the first one was quicker."""
    one, two = (up(store, name) for name in "ab")
    first, second = submit(store, 2)
    with meanwhile(
        store, lambda conn: claims.claim(conn, one, LEASE_S), lambda conn: claims.claim(conn, two, LEASE_S)
    ) as other:
        assert other.end().holder.job_id == second
    assert row(store, first)["attempts"][0]["host"] == "a"


def test_two_reconcilers_at_once(store: Store, running: Holder) -> None:
    with meanwhile(store, reconcile, reconcile) as other:
        assert other.end() == []
    assert row(store, running.job_id)["lost"] == 1


def test_two_workers_register_one_name_at_once(store: Store) -> None:
    with meanwhile(
        store, lambda conn: hosts.register(conn, a_host(run="1")), lambda conn: hosts.register(conn, a_host(run="2"))
    ) as other:
        other.end()
    with store.read() as conn:
        found = hosts.find(conn, "a")
    assert found is not None
    assert found["incarnation"] == "2"


def test_events_of_a_job_appear_in_the_order_of_their_ids(store: Store, running: Holder) -> None:
    """A client resumes after the last id that it saw: a smaller one that shows up later would be lost to it."""
    first = lambda conn: events.add(conn, running.job_id, "first", {})  # noqa: E731
    second = lambda conn: events.add(conn, running.job_id, "second", {})  # noqa: E731
    other = Second(store, second)
    with store.write() as conn:
        first(conn)
        other.start_and_meet_the_lock()
        with store.read() as reading:
            seen = reading.scalar(select(func.max(events_table.c.id)))
            assert seen is not None
            assert [e["type"] for e in events.after(reading, running.job_id, 0)] == ["state", "state"]
    other.end()
    with store.read() as conn:
        assert [e["type"] for e in events.after(conn, running.job_id, seen)] == ["first", "second"]


def test_no_deadlock_whoever_meets_whom(database_url: str) -> None:
    """Claims, heartbeats, ends, cancellations, reconciliations and restarts, all at the same few jobs."""
    setup = Store(database_url)
    names = ["a", "b", "c"]
    for name in names:
        up(setup, name, cpu=4, machine="m" if name != "c" else "n")
    submit(setup, 12)
    rounds = 12
    failures: list[Exception] = []

    def worker(name: str) -> None:
        store = Store(database_url)
        host = a_host(name, cpu=4, machine="m" if name != "c" else "n")
        try:
            for number in range(rounds):
                taken = []
                for _ in range(3):
                    with store.write() as conn:
                        taken.append(claims.claim(conn, host, LEASE_S))
                with store.write() as conn:
                    leases.renew(conn, name, "1", LEASE_S if number % 2 else -1)  # -1: has ended already
                for claimed in filter(None, taken[::-1]):
                    with store.write() as conn:
                        if leases.progress(conn, claimed.holder, {"done": number}):
                            leases.give_back(conn, claimed.holder, "r", spent=False, max_attempts=3)
        except SQLAlchemyError as error:
            failures.append(error)
        finally:
            store.dispose()

    def others(turn: int) -> None:
        store = Store(database_url)
        try:
            for number in range(rounds):
                with store.write() as conn:
                    leases.reconcile(conn, max_attempts=1000, ring_again_s=0)
                with store.write() as conn:
                    leases.take_back_from(conn, names[(number + turn) % 3], "x", "r", max_attempts=1000)
                [job_id] = submit(store)
                with store.write() as conn:
                    jobs.cancel(conn, job_id)
        except SQLAlchemyError as error:
            failures.append(error)
        finally:
            store.dispose()

    threads = [threading.Thread(target=worker, args=(name,)) for name in names]
    threads += [threading.Thread(target=others, args=(turn,)) for turn in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    setup.dispose()
    assert failures == []
