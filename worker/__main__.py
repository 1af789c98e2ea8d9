"""`python -m worker`: the worker process of this host, configured by TORCHSTONE_* variables.

It runs until SIGTERM or SIGINT, then takes no more jobs, lets the running ones go on for a while, and hands back the
rest.
Exit codes: 0 stopped in order, 2 cannot start as asked.
"""

from __future__ import annotations

import sys

from torchstone.errors import SetupError
from torchstone.logging_setup import configure_logging
from torchstone.settings import Settings
from torchstone.store import require_current_schema


def main() -> int:
    """Run the worker; its exit code."""
    settings = Settings()
    configure_logging(settings.log_level, "worker")
    from worker.app import build, serve
    from worker.host import WorkerHost

    try:
        host = WorkerHost(settings)
        require_current_schema(host.store)
        app = build(settings, host)
        host.open()
    except SetupError as error:
        print(f"torchstone worker: {error}", file=sys.stderr)
        return 2
    try:
        serve(app)
    finally:
        host.drain()
        host.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
