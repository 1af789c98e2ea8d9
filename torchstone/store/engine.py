"""One engine for SQLite and PostgreSQL, with transactions that mean the same in both.

    store = Store(settings.database_url)
    with store.write() as conn:          # SQLite: BEGIN IMMEDIATE, so that a read-then-write never meets BUSY
        jobs.insert_many(conn, [new])
    with store.read() as conn:
        jobs.get(conn, job_id)

The functions in `torchstone.store.jobs`, `leases`, `hosts`, `logs` take the connection: a caller decides what belongs
into one transaction.

Locks on PostgreSQL are always taken in this order, so that no two transactions wait for each other: the machine's
advisory lock, hosts, jobs by id, placements by job id.

Not covered: a process that is frozen (SIGSTOP) inside a write transaction holds SQLite's only write lock until it goes
on. PostgreSQL ends such a session after a few seconds.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, make_url
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from torchstone.errors import SetupError

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

BUSY_TIMEOUT_S = 60
_ENDED_WITHIN_S = 3.0  # how long `dispose` waits for transactions of other threads
_SQLITE_PRAGMAS = ("synchronous=FULL", "foreign_keys=ON")
_POSTGRESQL_CONNECTION: dict[str, Any] = {
    "connect_timeout": 5,
    # A server or network that fell silent is noticed well before a worker's lease ends.
    "keepalives_idle": 5,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
# SQLSTATEs of a server out of reach, starting, stopping, out of space, memory or connections, and of transactions in
# each other's way
_PASSING_SQLSTATES = ("08", "57P", "53", "40001", "40P01", "55P03", "25P03")
# A full disk is made room on, and a file that could not be opened or read (no descriptors left) can be a moment later.
_LOCKED_SQLITE_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_PASSING_SQLITE_CODES = (
    *_LOCKED_SQLITE_CODES,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
)


class Store:
    """The database behind one process: an engine and two kinds of transaction.

    `busy_timeout_s` is how long a call waits for a lock that another transaction holds, before it fails as transient.
    """

    def __init__(self, database_url: str, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self.engine = _engine(database_url, busy_timeout_s)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        options = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        self._reading = self.engine.execution_options(**options)
        self._writing = self.engine.execution_options(torchstone_write=True)
        self._open = 0  # transactions
        self._ended = threading.Condition()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection for reading: everything it reads is one consistent state."""
        with self._counted(), self._reading.connect() as conn:
            yield conn

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that commits at the end, or rolls back on any exception."""
        with self._counted(), self._writing.begin() as conn:
            yield conn

    def dispose(self) -> None:
        """Close every pooled connection, once the transactions of other threads have ended or 3 s have passed.

        A connection that is given back later is closed by nobody: its pool is no more.
        """
        with self._ended:
            self._ended.wait_for(lambda: self._open == 0, _ENDED_WITHIN_S)
        self.engine.dispose()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._ended:
            self._open += 1
        try:
            yield
        finally:
            with self._ended:
                self._open -= 1
                self._ended.notify_all()


def is_transient(error: SQLAlchemyError) -> bool:
    """Whether the database was merely out of reach, locked or out of space: the same call may succeed later."""
    if isinstance(error, PoolExhausted):
        return True
    if not isinstance(error, DBAPIError) or isinstance(error, IntegrityError):
        return False
    if error.connection_invalidated:
        return True
    if isinstance(error.orig, sqlite3.Error):
        return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _PASSING_SQLITE_CODES
    sqlstate = getattr(error.orig, "sqlstate", None)
    if sqlstate is None:  # the server did not get to say anything
        return isinstance(error, OperationalError)
    return str(sqlstate).startswith(_PASSING_SQLSTATES)


def insert_into(conn: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that can say what to do about a row that is there already."""
    if conn.dialect.name == "sqlite":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql  # loaded where it is used: it is 4 % of the service's start

    return postgresql.insert(table)


def storable(text: str) -> str:
    """`text` with what a database or UTF-8 cannot hold (NUL, lone surrogates) shown as replacement characters."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


def _engine(database_url: str, busy_timeout_s: float) -> Engine:
    try:
        url = make_url(database_url)
    except ArgumentError:  # it may hold a password, so it is not shown
        raise SetupError("the database URL cannot be understood: give sqlite:////path or postgresql://...") from None
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, busy_timeout_s)
    if url.get_backend_name() == "postgresql":
        return _postgresql(url, busy_timeout_s)
    raise SetupError(f"database URL {url.render_as_string()!r}: only sqlite:/// and postgresql:// are supported")


def _postgresql(url: URL, busy_timeout_s: float) -> Engine:
    options = f"-c idle_in_transaction_session_timeout=10s -c lock_timeout={int(busy_timeout_s * 1000)}"
    arguments = {k: v for k, v in (_POSTGRESQL_CONNECTION | {"options": options}).items() if k not in url.query}
    return create_engine(
        url, connect_args=arguments, pool_pre_ping=True, pool_size=10, max_overflow=10, pool_timeout=10
    )


def _sqlite(url: URL, busy_timeout_s: float) -> Engine:
    if not url.database or url.database == ":memory:":
        raise SetupError("an in-memory SQLite database cannot be shared by processes: give sqlite:////path/to/file.db")
    try:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"the folder of the database {url.database} cannot be made: {error.strerror}") from None
    engine = create_engine(url, connect_args={"timeout": busy_timeout_s}, pool_size=10, max_overflow=30)

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's own implicit BEGINs stay out of the way
        _use_write_ahead_log(connection, busy_timeout_s)
        for pragma in _SQLITE_PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(conn: Connection) -> None:
        if conn.get_execution_options().get("torchstone_write", False):
            conn.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            # Straight to the driver: SQLAlchemy's way to it would take as long as most of our reads themselves.
            cursor = conn.connection.cursor()
            cursor.execute("BEGIN")
            cursor.close()

    return engine


def _use_write_ahead_log(connection: sqlite3.Connection, busy_timeout_s: float) -> None:
    """Switch the file to WAL. Of several first comers at once, SQLite fails all but one without waiting."""
    deadline_s = time.monotonic() + busy_timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _LOCKED_SQLITE_CODES or time.monotonic() > deadline_s:
                raise
            time.sleep(0.005)
        else:
            return
