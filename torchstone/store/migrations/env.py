"""Alembic's environment: migrations run on the connection that `torchstone.store.migrate` hands over."""

from __future__ import annotations

from alembic import context

from torchstone.store.schema import metadata

# One transaction around all of it, so a failed migration leaves nothing behind (SQLite and PostgreSQL both can).
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
context.run_migrations()
