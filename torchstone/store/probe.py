"""Whether anybody wrote into the database since one last looked, without looking at any row.

    probe = Probe(store)
    probe.changed()        # True: the first look
    probe.changed()        # False, unless some connection of some process committed meanwhile

On SQLite this is `PRAGMA data_version`, a few microseconds. PostgreSQL has nothing as cheap: there it is always True.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import PoolProxiedConnection

from torchstone.store.engine import Store


class Probe:
    """Holds a connection of its own, which never writes: SQLite's version is comparable only within one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._connection: PoolProxiedConnection | None = None
        self._version: Any = None

    def changed(self) -> bool:
        """Whether something was committed since the last call."""
        if not self._store.is_sqlite:
            return True
        if self._connection is None:
            self._connection = self._store.engine.raw_connection()
        cursor = self._connection.cursor()
        try:
            cursor.execute("PRAGMA data_version")
            version = cursor.fetchone()[0]  # type: ignore[index]
        except Exception:
            self.close()
            raise
        cursor.close()
        changed, self._version = version != self._version, version
        return bool(changed)

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._version = None
