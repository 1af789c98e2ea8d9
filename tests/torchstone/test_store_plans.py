"""What is asked often costs the same however many jobs there are: the databases' own plans say so.

Each call runs for real on 100,000 jobs, with as many old placements; its statements are caught and explained.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, event, text

from tests.torchstone.store_samples import LEASE_S, a_host, spec
from torchstone.jobs import State
from torchstone.specs import BaseSpec
from torchstone.store import Store, artifacts, claims, events, hosts, jobs, leases, logs
from torchstone.store.jobs import NewJob

pytestmark = pytest.mark.slow
MANY = 100_000
QUEUED = 20_000
BIG = {"jobs", "placements", "attempts", "events", "labels", "results", "logs", "artifacts", "idempotency_keys"}


def fill(store: Store) -> list[str]:
    """Jobs in every state, each with a label, an attempt, a placement and two events; ids in order."""
    ran = MANY - QUEUED
    number = "printf('%036d', i)" if store.is_sqlite else "lpad(CAST(i AS text), 36, '0')"
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {MANY - 1}) "
    job_columns = (
        "id, kind, labels, spec_version, spec, state, priority, rank_us, device_type, device_count, isolation, "
        "memory_bytes, timeout_s, start_by_us, created_us, attempt, rung_us"
    )
    job_values = (
        f"{number}, 'jit', '{{}}', 1, '{{}}', "
        f"CASE WHEN i >= {ran} THEN 'queued' WHEN i % 9 = 0 THEN 'failed' ELSE 'succeeded' END, "
        f"i % 3, i, 'cpu', 1, 'device', 0, 60, CASE WHEN i % 100 = 0 THEN {1 << 60} END, i, i < {ran}, i"
    )
    if not store.is_sqlite:
        job_values = job_values.replace(f"i < {ran}", f"CAST(i < {ran} AS int)")
    every, those_that_ran = "", f" WHERE i < {ran}"
    fillings = [
        ("jobs", job_columns, job_values, every),
        ("labels", "key, value, job_id", f"'n', CAST(i % 1000 AS text), {number}", every),
        ("events", "job_id, at_us, type, data", f"{number}, 1, 'state', '{{}}'", every),
        ("idempotency_keys", "key, body_sha256, job_id", f"{number}, '', {number}", every),
        ("results", "job_id, result", f"{number}, '{{}}'", those_that_ran),
        ("logs", "job_id, attempt, seq, text", f"{number}, 1, 0, ''", those_that_ran),
        (
            "artifacts",
            "job_id, name, media_type, bytes, sha256, created_us",
            f"{number}, 'a', '', 1, '', 1",
            those_that_ran,
        ),
        ("attempts", "job_id, number, started_us, finished_us", f"{number}, 1, 1, 1", those_that_ran),
        (
            "placements",
            "job_id, attempt, host, machine, incarnation, devices, exclusive, lease_until_us, released_us",
            f"{number}, 1, 'a', 'machine of a', '1', '[]', false, 1, 1",
            those_that_ran,
        ),
    ]
    with store.write() as conn:
        if not store.is_sqlite:
            conn.execute(text("SET LOCAL session_replication_role = replica"))  # foreign keys are right, and take long
        for table, columns, values, which in fillings:
            statement = f"INSERT INTO {table} ({columns}) {numbers} SELECT {values} FROM n{which}"
            conn.execute(text(statement))
    return [f"{i:036d}" for i in range(MANY)]


_full: dict[str, tuple[str, list[str]]] = {}
"""The URL and the ids of each database, made once for all tests here: they undo what they write."""


@pytest.fixture
def full(
    backend: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Store, list[str]]]:
    """A store with many rows."""
    if backend not in _full:
        if backend == "sqlite":
            migrated = request.getfixturevalue("migrated_sqlite")
            url = f"sqlite:///{shutil.copy(migrated, tmp_path_factory.mktemp('full') / 'full.db')}"
        else:
            server = request.getfixturevalue("postgresql")
            url = server.url(server.create("migrated"))
        store = Store(url)
        _full[backend] = (url, fill(store))
        with store.write() as conn:
            hosts.register(conn, HOST)
        if not store.is_sqlite:
            with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
                conn.execute(text("VACUUM ANALYZE"))  # as autovacuum would have done by then
        store.dispose()
    url, ids = _full[backend]
    store = Store(url)
    yield store, ids
    store.dispose()


class Undone(Exception):
    pass


@contextmanager
def explained(store: Store) -> Iterator[tuple[Connection, list[str]]]:
    """A write transaction that is undone at the end; the plans of all statements in it."""
    statements: list[tuple[str, Any]] = []
    plans: list[str] = []
    noted = False

    def note(_conn: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        nonlocal noted
        noted = True
        statements.append((statement, parameters))

    def trace(statement: str) -> None:
        """Of what goes past SQLAlchemy to SQLite's driver, with the values in their places."""
        nonlocal noted
        if not noted:
            statements.append((statement, ()))
        noted = False

    with contextlib.suppress(Undone), store.write() as conn:
        event.listen(conn, "before_cursor_execute", note)
        driver = conn.connection.driver_connection
        if store.is_sqlite:
            driver.set_trace_callback(trace)
        yield conn, plans
        if store.is_sqlite:
            driver.set_trace_callback(None)
        event.remove(conn, "before_cursor_execute", note)
        for statement, parameters in statements:
            if statement.split()[0] in ("SELECT", "UPDATE", "DELETE", "INSERT", "WITH"):
                plans += explain(conn, statement, parameters)
        raise Undone


def explain(conn: Connection, statement: str, parameters: Any) -> list[str]:
    cursor = conn.connection.cursor()
    if conn.dialect.name == "sqlite":
        cursor.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
        return [str(step[3]) for step in cursor.fetchall()]
    if isinstance(parameters, list):
        parameters = parameters[0]
    cursor.execute(f"EXPLAIN {statement}", parameters)
    return [str(step[0]) for step in cursor.fetchall()]


# SQLite: "SCAN jobs", "SCAN placements USING INDEX ..." (all of an index); PostgreSQL: "Seq Scan on jobs".
SCAN = re.compile(r"(?:SCAN|Seq Scan on) (\w+)(?: (?:USING|USE).*? (ix_\w+))?")
SMALL = {"ix_placements_held", "ix_jobs_start_by"}
"""Indexes of few rows: what is leased, and what may expire."""


def scanned(plans: list[str]) -> list[str]:
    """The steps that read all of a big table or index, or sort many rows."""
    found = []
    for step in plans:
        match = SCAN.search(step)
        if match and match[1] in BIG and match[2] not in SMALL:
            found.append(step)
        if step.strip().startswith("USE TEMP B-TREE FOR ORDER BY"):
            found.append(step)
    return found


HOST = a_host(cpu=4)
HOLDER = leases.Holder("0" * 36, 1, "a", "1")


def new_job(job_spec: BaseSpec) -> NewJob:
    return NewJob.of(job_spec, idempotency_key="k")


CALLS: dict[str, Callable[[Connection, str], object]] = {
    "poll one": jobs.get,
    "state": jobs.state_of,
    "states": lambda conn, job_id: jobs.states_of(conn, [job_id, "x"]),
    "newest events": lambda conn, job_id: events.latest(conn, [job_id, "x"]),
    "events": lambda conn, job_id: events.after(conn, job_id, 5),
    "logs": lambda conn, job_id: logs.read(conn, job_id, attempt=1),
    "artifacts": artifacts.all_of,
    "position": lambda conn, job_id: jobs.ahead_of(conn, job_id, MANY - QUEUED // 2),
    "submit": lambda conn, _: jobs.insert_many(conn, [new_job(spec(labels={"a": "b"}))]),
    "cancel": jobs.cancel,
    "page": lambda conn, _: jobs.page(conn),
    "page, further": lambda conn, job_id: jobs.page(conn, before=job_id),
    "page by state": lambda conn, job_id: jobs.page(conn, states=["failed"], before=job_id),
    "page by a state that none has": lambda conn, job_id: jobs.page(conn, states=["canceling"], before=job_id),
    "page by states": lambda conn, job_id: jobs.page(conn, states=["failed", "expired", "queued"], before=job_id),
    "page by kind": lambda conn, job_id: jobs.page(conn, kind="jit", before=job_id),
    "page by a kind that none has": lambda conn, job_id: jobs.page(conn, kind="none", before=job_id),
    "page by kind and state": lambda conn, job_id: jobs.page(conn, kind="jit", states=["canceling"], before=job_id),
    "page by label": lambda conn, job_id: jobs.page(conn, label=("n", "7"), before=job_id),
    "claim": lambda conn, _: claims.claim(conn, HOST, LEASE_S),
    "heartbeat": lambda conn, _: leases.renew(conn, "a", "1", LEASE_S),
    "held": lambda conn, _: leases.held(conn, "a", "1"),
    "progress": lambda conn, _: leases.progress(conn, HOLDER, {"done": 1}),
    "finish": lambda conn, _: leases.finish(conn, HOLDER, State.succeeded, result="{}"),
    "take back": lambda conn, _: leases.take_back_from(conn, "a", "2", "r", max_attempts=3),
    "inventory": lambda conn, _: hosts.inventory(conn, LEASE_S),
    "leased": lambda conn, _: hosts.leased(conn),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_plan_reads_a_whole_table(full: tuple[Store, list[str]], call: str) -> None:
    store, ids = full
    with explained(store) as (conn, plans):
        CALLS[call](conn, ids[MANY - QUEUED // 2])
    assert plans
    if call == "page":
        plans = [step for step in plans if "SCAN jobs USING INDEX sqlite_autoindex_jobs_1" not in step]  # to the limit
    assert scanned(plans) == [], plans


def test_the_reconciler_reads_only_what_waits_and_what_is_leased(full: tuple[Store, list[str]]) -> None:
    store, _ = full
    with explained(store) as (conn, plans):
        _, gangs = leases.reconcile(conn, max_attempts=3, ring_again_s=20)
        assert gangs == [("cpu", 1)]
    assert [step for step in scanned(plans) if "ix_jobs_queue" not in step] == [], plans


def test_a_scan_would_be_noticed(full: tuple[Store, list[str]]) -> None:
    store, _ = full
    with explained(store) as (conn, plans):
        conn.execute(text("SELECT count(*) FROM jobs WHERE name = 'x'"))
        conn.execute(text("SELECT count(*) FROM placements WHERE host = 'x'"))
    assert len(scanned(plans)) == 2
