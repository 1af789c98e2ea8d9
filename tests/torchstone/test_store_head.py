"""The revision that the code names as the newest is the newest, so that a start need not import Alembic to know it."""

from __future__ import annotations

from alembic.script import ScriptDirectory

from torchstone.store.migrate import HEAD, _config


def test_head_is_the_newest_revision() -> None:
    assert ScriptDirectory.from_config(_config()).get_current_head() == HEAD
