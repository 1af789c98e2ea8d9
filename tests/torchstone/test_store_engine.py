"""Transactions on both databases, and which of their errors pass by themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, literal, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from tests.conftest import postgresql_server
from tests.torchstone.store_samples import row, submit
from torchstone.errors import SetupError
from torchstone.store import Store, is_transient
from torchstone.store.engine import storable
from torchstone.store.schema import jobs, now_us


def test_a_write_is_whole_or_nothing(store: Store) -> None:
    [job_id] = submit(store)
    before = row(store, job_id)
    with contextlib.suppress(ZeroDivisionError), store.write() as conn:
        conn.execute(jobs.update().values(kind="other"))
        raise ZeroDivisionError
    assert row(store, job_id) == before


def test_a_read_writes_nothing(store: Store) -> None:
    [job_id] = submit(store)
    before = row(store, job_id)
    refused = contextlib.nullcontext() if store.is_sqlite else pytest.raises(DBAPIError, match="read-only")
    with store.read() as conn, refused:
        conn.execute(jobs.update().values(kind="other"))
    assert row(store, job_id) == before


def test_a_read_sees_one_state_whatever_is_written_meanwhile(store: Store) -> None:
    [job_id] = submit(store)
    with store.read() as conn:
        before = conn.scalar(select(jobs.c.state))
        with store.write() as other:
            other.execute(jobs.update().where(jobs.c.id == job_id).values(state="expired"))
        assert conn.scalar(select(jobs.c.state)) == before == "queued"
    with store.read() as conn:
        assert conn.scalar(select(jobs.c.state)) == "expired"


def test_closing_waits_for_whoever_is_in_a_transaction(database_url: str) -> None:
    """A connection given back to a pool that is gone would stay open."""
    # Given a thread in a transaction
    store = Store(database_url)
    inside, may_end = threading.Event(), threading.Event()
    held: list[Any] = []

    def read() -> None:
        with store.read() as conn:
            conn.execute(text("SELECT 1"))
            held.append(conn.connection.driver_connection)
            inside.set()
            may_end.wait(30)

    reader, closer = threading.Thread(target=read), threading.Thread(target=store.dispose)
    reader.start()
    assert inside.wait(30)
    # When the store is closed meanwhile
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    may_end.set()
    closer.join(30)
    reader.join(30)
    # Then its connection is closed, too.
    with pytest.raises(Exception, match="closed"):
        held[0].execute("SELECT 1")


def test_the_clock_goes_on_within_a_transaction(store: Store) -> None:
    with store.write() as conn:
        first = conn.execute(select(now_us())).scalar_one()
        assert abs(first - time.time() * 1e6) < 5_000_000
        deadline_s = time.monotonic() + 10
        while conn.execute(select(now_us())).scalar_one() == first:  # SQLite's ticks are milliseconds
            assert time.monotonic() < deadline_s
        assert conn.execute(select(now_us())).scalar_one() > first


def test_text_that_no_database_can_hold_is_made_storable(store: Store) -> None:
    made = storable("a\x00b\ud800c é")
    assert made == "a\ufffdb?c é"
    with store.read() as conn:
        assert conn.scalar(select(literal(made))) == made


class TestTransient:
    def error(self, store: Store, statement: str) -> SQLAlchemyError:
        with pytest.raises(SQLAlchemyError) as raised, store.write() as conn:
            conn.execute(text(statement))
        return raised.value

    def test_a_fault_of_the_statement_is_not(self, store: Store) -> None:
        error = self.error(store, "SELECT * FROM no_connection_is_closed_or_locked")
        assert isinstance(error, (OperationalError, ProgrammingError))
        assert not is_transient(error)

    def test_a_broken_constraint_is_not_whatever_its_values_say(self, store: Store) -> None:
        submit(store)
        with pytest.raises(IntegrityError) as raised, store.write() as conn:
            conn.execute(insert(jobs).values(id="connection closed", kind="locked"))
        assert not is_transient(raised.value)

    def test_a_used_up_pool_is(self) -> None:
        assert is_transient(PoolExhausted("QueuePool limit"))

    def test_a_full_disk_is(self, tmp_path: Path) -> None:
        store = Store(f"sqlite:///{tmp_path / 'full.db'}")
        with pytest.raises(SQLAlchemyError) as raised, store.write() as conn:
            conn.exec_driver_sql("PRAGMA max_page_count=2")
            conn.execute(text("CREATE TABLE t (x)"))
            conn.execute(text("INSERT INTO t VALUES (zeroblob(100000))"))
        assert "full" in str(raised.value)
        assert is_transient(raised.value)
        store.dispose()

    def test_a_locked_database_is_and_works_again_when_the_lock_is_gone(self, database_url: str) -> None:
        # Given
        patient = Store(database_url)
        hasty = Store(database_url, busy_timeout_s=0.05)
        [job_id] = submit(patient)
        with patient.write() as conn:
            conn.execute(jobs.update().values(name="mine"))
            # When
            with pytest.raises(SQLAlchemyError) as raised, hasty.write() as other:
                other.execute(jobs.update().values(name="theirs"))
        # Then
        assert is_transient(raised.value)
        with hasty.write() as other:
            other.execute(jobs.update().values(name="theirs"))
        assert row(patient, job_id)["name"] == "theirs"
        patient.dispose()
        hasty.dispose()

    def test_two_transactions_in_each_others_way_are(self, store: Store) -> None:
        """PostgreSQL ends one of them; on SQLite the second waits for the first."""
        first, second = submit(store, 2)
        both_hold_one = threading.Barrier(1 if store.is_sqlite else 2)
        errors: list[SQLAlchemyError] = []

        def lock(one: str, other: str) -> None:
            try:
                with store.write() as conn:
                    conn.execute(jobs.update().where(jobs.c.id == one).values(name="x"))
                    both_hold_one.wait(30)
                    conn.execute(jobs.update().where(jobs.c.id == other).values(name="x"))
            except SQLAlchemyError as error:
                errors.append(error)

        threads = [threading.Thread(target=lock, args=pair) for pair in ((first, second), (second, first))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == (0 if store.is_sqlite else 1)
        assert all(is_transient(error) for error in errors)

    def test_a_server_that_stops_and_comes_back(self) -> None:
        with postgresql_server() as server:
            # Given a store with an open connection
            store = Store(server.url("postgres"))
            try:
                with pytest.raises(SQLAlchemyError) as raised, store.write() as conn:
                    conn.execute(text("SELECT 1"))
                    # When the server goes while it is used
                    server.stop()
                    conn.execute(text("SELECT 1"))
                assert is_transient(raised.value)
                # and stays away
                with pytest.raises(SQLAlchemyError) as raised, store.write() as conn:
                    conn.execute(text("SELECT 1"))
                assert is_transient(raised.value)
                # Then, once it is back, the same store works again.
                server.start()
                with store.write() as conn:
                    assert conn.scalar(text("SELECT 1")) == 1
            finally:
                store.dispose()

    def test_a_server_that_takes_connections_and_says_nothing(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/d?connect_timeout=2"
            store = Store(url)
            with pytest.raises(SQLAlchemyError) as raised, store.read() as conn:
                conn.execute(text("SELECT 1"))
            store.dispose()
        assert is_transient(raised.value)


def _open(url: str, together: Barrier, errors: Queue[str]) -> None:
    together.wait(30)
    store = Store(url)
    try:
        with store.read() as conn:
            conn.execute(text("SELECT 1"))
    except SQLAlchemyError as error:
        errors.put(repr(error))
    store.dispose()


def test_many_processes_may_be_the_first_to_open_a_file(tmp_path: Path) -> None:
    """One of them makes it a write-ahead-log database; to the others SQLite says "locked" at once, timeout or not."""
    fork = multiprocessing.get_context("fork")
    errors: Queue[str] = fork.Queue()
    for number in range(12):  # without the remedy about one round in six fails
        together = fork.Barrier(6)
        arguments = (f"sqlite:///{tmp_path / f'{number}.db'}", together, errors)
        processes = [fork.Process(target=_open, args=arguments) for _ in range(6)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
    assert errors.empty()


class TestUrl:
    @pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
    def test_a_database_in_memory_is_refused(self, url: str) -> None:
        with pytest.raises(SetupError, match="cannot be shared by processes"):
            Store(url)

    def test_another_database_is_refused_without_showing_its_password(self) -> None:
        with pytest.raises(SetupError, match="only sqlite:/// and postgresql://") as refused:
            Store("mysql://me:secret@host/db")
        assert "secret" not in str(refused.value)

    def test_what_is_no_url_is_refused_without_showing_it(self) -> None:
        with pytest.raises(SetupError, match="cannot be understood") as refused:
            Store("user:secret@somewhere")
        assert "secret" not in str(refused.value)

    def test_a_folder_that_cannot_be_made_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(SetupError, match=r"folder of the database .*file/x\.db cannot be made"):
            Store(f"sqlite:///{tmp_path / 'file' / 'x.db'}")

    def test_the_folder_of_an_sqlite_file_is_made(self, tmp_path: Path) -> None:
        store = Store(f"sqlite:///{tmp_path / 'a' / 'b' / 'c.db'}")
        with store.read() as conn:
            assert conn.scalar(text("PRAGMA journal_mode")) == "wal"
            assert conn.scalar(text("PRAGMA foreign_keys")) == 1
            assert conn.scalar(text("PRAGMA synchronous")) == 2  # FULL: an answered POST survives a power cut
        store.dispose()
