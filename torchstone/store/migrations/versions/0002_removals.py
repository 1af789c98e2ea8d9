"""Bytes that are being removed, outside any transaction."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "removals",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("since_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_removals")),
    )


def downgrade() -> None:
    op.drop_table("removals")
