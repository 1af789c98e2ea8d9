"""Alembic, run from code: `migrate(url)` brings a database to the newest schema, `require_current_schema` checks it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from torchstone.errors import SetupError
from torchstone.store.engine import Store

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0002"
"""The newest revision under migrations/versions, which this code was written for."""
_MIGRATIONS = Path(__file__).parent / "migrations"
_ADVISORY_LOCK = 7086331524900


def migrate(database_url: str) -> str:
    """Apply every missing migration; safe to run twice and by two processes at once. The revision it ends at.

    Raises SetupError, and changes nothing, when a newer version of Torchstone has been at this database.
    """
    from alembic import command

    store = Store(database_url)
    try:
        with store.write() as conn:
            if not store.is_sqlite:
                conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
            config = _config()
            _refuse_unknown(config, _revision(conn))
            config.attributes["connection"] = conn
            command.upgrade(config, "head")
            return _revision(conn) or ""
    finally:
        store.dispose()


def require_current_schema(store: Store) -> None:
    """Raise SetupError unless the database answers and has exactly the schema that this code was written for."""
    try:
        with store.read() as conn:
            # As Alembic would read it; to import Alembic for that would double the time that a service takes to start.
            known = inspect(conn).has_table("alembic_version")
            found = conn.scalar(text("SELECT version_num FROM alembic_version")) if known else None
    except SQLAlchemyError as error:
        where = store.engine.url.render_as_string()
        raise SetupError(f"the database {where} cannot be used: {getattr(error, 'orig', None) or error}") from error
    if found == HEAD:
        return
    from alembic.script import ScriptDirectory

    config = _config()
    head = ScriptDirectory.from_config(config).get_current_head()
    _refuse_unknown(config, found)
    if found != head:
        have = f"is at revision {found}" if found else "has no Torchstone tables"
        raise SetupError(f"the database {have}; this version needs {head}: run `torchstone migrate` first")


def _refuse_unknown(config: Config, revision: str | None) -> None:
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise SetupError(f"the database is at revision {revision}, made by a newer version of Torchstone: run that one")


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config


def _revision(conn: Connection) -> str | None:
    from alembic.migration import MigrationContext

    return MigrationContext.configure(conn).get_current_revision()
