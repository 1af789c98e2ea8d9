"""One engine for SQLite and PostgreSQL, with transactions that mean the same in both.

    store = Store(settings.database_url)
    with store.write() as conn:          # SQLite: BEGIN IMMEDIATE, so that a read-then-write never meets BUSY
        jobs.insert_many(conn, [new])
    with store.read() as conn:
        jobs.get(conn, job_id)

The functions in `torchstone.store.jobs`, `leases`, `hosts`, `logs` take the connection: a caller decides what belongs
into one transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from torchstone.errors import SetupError

BUSY_TIMEOUT_S = 60
_SQLITE_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON")


class Store:
    """The database behind one process: an engine and two kinds of transaction."""

    def __init__(self, database_url: str) -> None:
        self.engine = _engine(database_url)
        self.is_sqlite = self.engine.dialect.name == "sqlite"

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection for reading; what it sees is one consistent state on SQLite, one per statement on PostgreSQL."""
        with self.engine.connect() as conn:
            yield conn

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that commits at the end, or rolls back on any exception."""
        with self.engine.connect().execution_options(torchstone_write=True) as conn, conn.begin():
            yield conn

    def dispose(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()


def is_transient(error: SQLAlchemyError) -> bool:
    """Whether the database was merely out of reach or locked, so that the same call may succeed later."""
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    message = str(error.orig).lower()
    return any(word in message for word in ("locked", "busy", "connection", "shutting down", "starting up", "closed"))


def _engine(database_url: str) -> Engine:
    url = make_url(database_url)
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() == "sqlite":
        return _sqlite(url)
    if url.get_backend_name() == "postgresql":
        return create_engine(url, pool_pre_ping=True, pool_size=10, max_overflow=10, pool_timeout=10)
    raise SetupError(f"database URL {url.render_as_string()!r}: only sqlite:/// and postgresql:// are supported")


def _sqlite(url: Any) -> Engine:
    if not url.database or url.database == ":memory:":
        raise SetupError("an in-memory SQLite database cannot be shared by processes: give sqlite:////path/to/file.db")
    Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S}, pool_size=10, max_overflow=30)

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's own implicit BEGINs stay out of the way
        for pragma in _SQLITE_PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(conn: Connection) -> None:
        write = conn.get_execution_options().get("torchstone_write", False)
        conn.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine
