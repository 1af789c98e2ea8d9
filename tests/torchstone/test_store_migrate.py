"""Migrations: they make exactly the schema of `schema.py`, on both databases, and only once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from torchstone.errors import SetupError
from torchstone.store import Store, migrate, require_current_schema
from torchstone.store.migrate import _config
from torchstone.store.schema import metadata


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[Store]:
    store = Store(empty_database_url)
    yield store
    store.dispose()


def downgrade(store: Store) -> None:
    config = _config()
    with store.write() as conn:
        config.attributes["connection"] = conn
        command.downgrade(config, "base")


def indexes(store: Store) -> dict[str, str]:
    """Every index by its name, as the database spells it."""
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    if not store.is_sqlite:
        query = (
            "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' AND tablename <> 'alembic_version'"
        )
    with store.read() as conn:
        return {name: " ".join(sql.replace('"', "").split()) for name, sql in conn.execute(text(query))}


def test_from_nothing_it_makes_the_schema_and_again_it_does_nothing(empty: Store, empty_database_url: str) -> None:
    assert migrate(empty_database_url) == migrate(empty_database_url) == "0002"
    require_current_schema(empty)
    with empty.read() as conn:
        context = MigrationContext.configure(conn, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []


def test_it_makes_the_same_indexes_as_the_metadata(empty: Store, store: Store) -> None:
    """Alembic does not compare which rows an index holds, nor on SQLite its expressions."""
    with empty.write() as conn:
        metadata.create_all(conn)
    assert indexes(store) == indexes(empty)
    assert "ix_jobs_queue" in indexes(store)


def test_it_can_be_undone(empty: Store, empty_database_url: str) -> None:
    migrate(empty_database_url)
    downgrade(empty)
    with empty.read() as conn:
        assert set(inspect(conn).get_table_names()) == {"alembic_version"}
    assert migrate(empty_database_url) == "0002"


def test_many_processes_at_once(empty: Store, empty_database_url: str) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.map(migrate, [empty_database_url] * 8, chunksize=1) == ["0002"] * 8
    require_current_schema(empty)


def test_a_migration_that_fails_leaves_nothing_behind(empty: Store, empty_database_url: str) -> None:
    # Given a table in the way
    with empty.write() as conn:
        conn.execute(text("CREATE TABLE placements (mine INTEGER)"))
    # When
    with pytest.raises(Exception, match="placements"):
        migrate(empty_database_url)
    # Then
    with empty.read() as conn:
        assert set(inspect(conn).get_table_names()) - {"alembic_version"} == {"placements"}
    with empty.write() as conn:
        conn.execute(text("DROP TABLE placements"))
    assert migrate(empty_database_url) == "0002"


def test_an_empty_database_is_refused_with_the_remedy(empty: Store) -> None:
    with pytest.raises(SetupError, match="has no Torchstone tables; this version needs 0002: run `torchstone migrate`"):
        require_current_schema(empty)


def test_a_newer_database_is_left_alone(store: Store, database_url: str) -> None:
    with store.write() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    try:
        for refuse in (lambda: require_current_schema(store), lambda: migrate(database_url)):
            with pytest.raises(SetupError, match="revision 9999, made by a newer version of Torchstone"):
                refuse()
    finally:
        with store.write() as conn:
            conn.execute(text("UPDATE alembic_version SET version_num = '0002'"))
