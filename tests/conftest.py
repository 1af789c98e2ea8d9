"""Databases for tests: every test that asks for one runs on SQLite and on a real PostgreSQL server.

    def test_something(store: Store): ...                  # migrated, empty of rows
    def test_something(database_url: str): ...              # the URL of that same database
    def test_something(empty_database_url: str): ...        # not even migrated

One PostgreSQL server serves the whole run, without durability, on a unix socket in a scratch folder; each test gets a
database to itself, copied from a migrated template or emptied after an earlier test (a twentieth of the time). Where
PostgreSQL is not installed, its half is skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from torchstone.store import Store, migrate
from torchstone.store.schema import metadata

_PR_SET_PDEATHSIG = 1
_FAST_AND_FORGETFUL = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "autovacuum=off")


@dataclass
class PostgreSQL:
    """A server that lives as long as this process at most: on a unix socket, owned by an unprivileged user."""

    binaries: Path
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _idle: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start it (again) and wait until it answers."""
        arguments: list[str | Path] = [
            self.binaries / "postgres",
            "-D",
            self.folder / "data",
            "-k",
            self.folder,
            "-h",
            "",
        ]
        for setting in _FAST_AND_FORGETFUL:
            arguments += ["-c", setting]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                arguments, cwd=self.folder, stdout=log, stderr=log, preexec_fn=_quit_with_parent(), **_unprivileged()
            )
        deadline_s = time.monotonic() + 30
        while True:
            try:
                self.connect("postgres").close()
                return
            except psycopg.OperationalError:
                if self.process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError((self.folder / "log").read_text()) from None
                time.sleep(0.02)

    def stop(self) -> None:
        """End it at once, with every connection."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)  # "immediate shutdown": its own children go too
            self.process.wait(timeout=30)
            self.process = None

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self.folder}"

    def connect(self, database: str) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection without transactions, past the store."""
        return psycopg.connect(self.url(database).replace("+psycopg", ""), autocommit=True)

    def create(self, template: str = "template1") -> str:
        """A new database, copied from a template; its name."""
        name = f"test{next(self._numbers)}"
        with self.connect("postgres") as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
        return name

    def take(self) -> str:
        """A migrated database without rows; its name."""
        return self._idle.pop() if self._idle else self.create("migrated")

    def put_back(self, name: str) -> None:
        """Empty a database for another test."""
        with self.connect(name) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
                [name],
            )
            tables = ", ".join(metadata.tables)
            connection.execute(f"TRUNCATE {tables} RESTART IDENTITY".encode())
        self._idle.append(name)


@contextlib.contextmanager
def postgresql_server() -> Iterator[PostgreSQL]:
    """A fresh, running server; skips the test where PostgreSQL is not installed."""
    binaries = _postgresql_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (no initdb on PATH or in /usr/lib/postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="torchstone-pg-"))  # short: a socket's path may have 107 bytes
    server = PostgreSQL(binaries, folder)
    try:
        user = _unprivileged()
        if user:
            os.chown(folder, user["user"], user["group"])
        command: list[str | Path] = [
            binaries / "initdb",
            "-D",
            folder / "data",
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "-N",
        ]
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, **user)
        assert made.returncode == 0, made.stderr
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


def _postgresql_binaries() -> Path | None:
    on_path = shutil.which("initdb")
    found = [Path(on_path)] if on_path else []
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))[::-1]
    return next((path.resolve().parent for path in found if (path.resolve().parent / "postgres").exists()), None)


def _unprivileged() -> dict[str, Any]:
    """How to start a server that refuses root: as somebody else."""
    if os.getuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _quit_with_parent() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    # Popen changes the user first, which would have cleared it.
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """The server of this run, with a migrated database named `migrated` to copy from."""
    with postgresql_server() as server:
        with server.connect("postgres") as connection:
            connection.execute("CREATE DATABASE migrated")
        migrate(server.url("migrated"))
        yield server


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy from."""
    path = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> str:
    """Which database this run of the test uses."""
    return str(request.param)


@pytest.fixture
def new_database(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Makes any number of migrated databases, for tests that need a fresh one per example."""
    if backend == "postgresql":
        server: PostgreSQL = request.getfixturevalue("postgresql")
        taken: list[str] = []

        def take() -> str:
            taken.append(server.take())
            return server.url(taken[-1])

        yield take
        for name in taken:
            server.put_back(name)
        return
    migrated: Path = request.getfixturevalue("migrated_sqlite")
    numbers = itertools.count()
    yield lambda: f"sqlite:///{shutil.copy(migrated, tmp_path / f'store{next(numbers)}.db')}"


@pytest.fixture
def database_url(new_database: Callable[[], str]) -> str:
    """The URL of a migrated database without rows."""
    return new_database()


@pytest.fixture
def empty_database_url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without tables."""
    if backend == "postgresql":
        server: PostgreSQL = request.getfixturevalue("postgresql")
        return server.url(server.create())
    return f"sqlite:///{tmp_path / 'empty.db'}"


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """A store on `database_url`."""
    store = Store(database_url)
    yield store
    store.dispose()
