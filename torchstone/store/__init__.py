"""The only SQL and the only disk: jobs, attempts, events and hosts in a database, artifact bytes beside it.

engine.py      one engine for SQLite and PostgreSQL, `read()` and `write()` transactions
schema.py      the tables
jobs.py        accept, read, list, cancel
leases.py      claim, renew, finish, give back, reconcile
retention.py   delete, keep for so long, remove bytes without a name
hosts.py       the workers that registered
events.py      what happened, in order
logs.py        what jobs printed
checkpoints.py what an attempt has saved for the next one
artifacts.py   content-addressed bytes
migrations/    Alembic; `migrate()` brings any database to the newest schema
"""

from torchstone.store.engine import Store, is_transient
from torchstone.store.migrate import migrate, require_current_schema

__all__ = ["Store", "is_transient", "migrate", "require_current_schema"]
