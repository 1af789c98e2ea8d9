"""The tables: one schema for SQLite and PostgreSQL, in SQLAlchemy Core.

Times are microseconds since 1970 (UTC) by the database's clock (`now_us()`), so that they sort and compare the same in
both. Specs, results and other documents are JSON text that passes through unparsed.

`jobs` says what is true now; `attempts` and `placements` say who tried where, and until when they may; `events` say
what happened, in order. `hosts` are the workers that registered. The shape is changed only by a migration.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    and_,
    event,
    literal_column,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


@event.listens_for(metadata, "before_create")
def _partial_on_postgresql(_: MetaData, conn: Connection, **__: Any) -> None:
    """Every index that is of some rows only on SQLite is so on PostgreSQL.

    Said here and not beside `sqlite_where`: naming PostgreSQL loads its dialect, 4 % of the start of a process that
    never meets it.
    """
    if conn.dialect.name == "postgresql":
        for index in (each for table in metadata.tables.values() for each in table.indexes):
            index.dialect_options["postgresql"]["where"] = index.dialect_options["sqlite"]["where"]


# SQLite counts a row id up only for the exact type INTEGER.
_AutoId = BigInteger().with_variant(Integer(), "sqlite")


class now_us(FunctionElement[int]):
    """The database's clock in microseconds since 1970 (SQLite resolves milliseconds)."""

    type = BigInteger()
    inherit_cache = True
    name = "now_us"


@compiles(now_us, "sqlite")
def _now_us_sqlite(element: now_us, compiler: Any, **_: Any) -> str:
    return "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) * 1000 AS INTEGER)"


@compiles(now_us, "postgresql")
def _now_us_postgresql(element: now_us, compiler: Any, **_: Any) -> str:
    # The time at which this statement arrived: unlike clock_timestamp() the planner may compare an index with it.
    return "CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000000 AS BIGINT)"


jobs = Table(
    "jobs",
    metadata,
    Column("id", Text, primary_key=True),  # UUIDv7: sorts by creation
    Column("kind", Text, nullable=False),
    Column("name", Text),
    Column("labels", Text, nullable=False),
    Column("owner", Text),
    Column("spec_version", Integer, nullable=False),
    Column("spec", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("rank_us", BigInteger, nullable=False),  # smallest first: when it came, less what its priority is worth
    Column("device_type", Text, nullable=False),
    Column("device_count", Integer, nullable=False),
    Column("isolation", Text, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),  # the least that it takes, known from the spec
    Column("timeout_s", Float, nullable=False),
    Column("start_by_us", BigInteger),
    Column("created_us", BigInteger, nullable=False),
    Column("started_us", BigInteger),
    Column("finished_us", BigInteger),
    Column("attempt", Integer, nullable=False, server_default=text("0")),  # the current one; 0 = none yet
    Column("lost", Integer, nullable=False, server_default=text("0")),  # attempts spent on vanished workers
    Column("rung_us", BigInteger, nullable=False),  # when its doorbell rang; 0 = not since it is back in the queue
    Column("progress", Text),
    Column("error", Text),
)
# The words stand in the statements themselves: with a bound value neither planner may use an index on just these rows.
is_queued: ColumnElement[bool] = jobs.c.state == literal_column("'queued'")
is_finished: ColumnElement[bool] = jobs.c.finished_us.is_not(None)
may_expire: ColumnElement[bool] = and_(is_queued, jobs.c.start_by_us.is_not(None))

# Claims and positions look only at what waits, in the order in which it should run; the columns behind the id let a
# host pass over what it cannot run without reading the rows. The state stands in front although it is always the same:
# without it SQLite, which has no statistics, prefers ix_jobs_state_id and sorts the whole queue for its first job.
Index(
    "ix_jobs_queue",
    jobs.c.state,
    jobs.c.rank_us,
    jobs.c.id,
    jobs.c.device_type,
    jobs.c.device_count,
    jobs.c.memory_bytes,
    jobs.c.rung_us,
    sqlite_where=is_queued,
)
Index("ix_jobs_start_by", jobs.c.start_by_us, sqlite_where=may_expire)
Index("ix_jobs_state_id", jobs.c.state, jobs.c.id)
Index("ix_jobs_finished_us", jobs.c.finished_us, sqlite_where=is_finished)
Index("ix_jobs_kind_state_id", jobs.c.kind, jobs.c.state, jobs.c.id)

# Apart from `jobs`, so that lists and claims never drag results along.
results = Table(
    "results",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("result", Text, nullable=False),
)

labels = Table(
    "labels",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, primary_key=True),
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
)
Index("ix_labels_job_id", labels.c.job_id)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("key", Text, primary_key=True),
    Column("body_sha256", Text, nullable=False),
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
)
Index("ix_idempotency_keys_job_id", idempotency_keys.c.job_id)

attempts = Table(
    "attempts",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("started_us", BigInteger, nullable=False),
    Column("finished_us", BigInteger),
    Column("outcome", Text),
    Column("reason", Text),
    Column("receipt", Text),  # JSON: what it took to end its processes, where the worker had to
)

# Where an attempt runs: one row a host, so that a gang over several hosts needs no other schema. A row whose
# released_us is null is a lease on its devices.
placements = Table(
    "placements",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("host", Text, primary_key=True),
    Column("machine", Text, nullable=False),
    Column("incarnation", Text, nullable=False),
    Column("devices", Text, nullable=False),  # JSON list of names
    Column("exclusive", Boolean, nullable=False),  # nobody else on the machine
    Column("lease_until_us", BigInteger, nullable=False),
    Column("released_us", BigInteger),
)
is_held: ColumnElement[bool] = placements.c.released_us.is_(None)
Index("ix_placements_held", placements.c.machine, sqlite_where=is_held)

hosts = Table(
    "hosts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("machine", Text, nullable=False),  # two workers on one machine share its leases
    Column("incarnation", Text, nullable=False),  # one run of the worker's process
    Column("pid", Integer, nullable=False),
    Column("pid_started", Float, nullable=False),
    Column("devices", Text, nullable=False),  # JSON list of {name, type, cores, uuid, description, memory_bytes}
    Column("memory_bytes", BigInteger, nullable=False),
    Column("cuda_count", Integer, nullable=False),
    Column("cpu_count", Integer, nullable=False),
    Column("info", Text, nullable=False),
    Column("state", Text, nullable=False),  # up | draining | down
    Column("registered_us", BigInteger, nullable=False),
    Column("seen_us", BigInteger, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", _AutoId, primary_key=True, autoincrement=True),
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("type", Text, nullable=False),
    Column("data", Text, nullable=False),
    sqlite_autoincrement=True,
)
Index("ix_events_job_id_id", events.c.job_id, events.c.id)

logs = Table(
    "logs",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("text", Text, nullable=False),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("media_type", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)
Index("ix_artifacts_sha256", artifacts.c.sha256)

# What the current attempt of a job has saved to go on from, part by part; the bytes are with those of the artifacts.
checkpoints = Table(
    "checkpoints",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)

# Bytes that may be without a name: what an attempt is about to store, and what a job that was deleted (attempt 0) let
# go. Without a foreign key, since the job may be gone.
loose_blobs = Table(
    "loose_blobs",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("job_id", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True),
)

# Bytes that somebody is about to remove: nobody begins to name them until that is done.
removals = Table(
    "removals",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("since_us", BigInteger, nullable=False),
)

# So that a job that was deleted is gone (410), not unknown (404).
deleted_jobs = Table(
    "deleted_jobs",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("deleted_us", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
)
Index("ix_deleted_jobs_deleted_us", deleted_jobs.c.deleted_us)
