"""`python -m worker`: the worker process of this host, configured by TORCHSTONE_* variables.

It runs until SIGTERM or SIGINT, then takes no more jobs, lets the running ones go on for a while, and hands back the
rest. Exit codes: 0 stopped in order, 2 cannot start as asked.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from torchstone.errors import SetupError
from torchstone.logging_setup import configure_logging
from torchstone.settings import Settings
from torchstone.store import require_current_schema


def main() -> int:
    """Run the worker; its exit code."""
    # Until Celery takes the signals over, a request to stop must still lead through the goodbye below.
    signal.signal(signal.SIGTERM, _leave)
    host = None
    try:
        settings = Settings.load()
        configure_logging(settings.log_level, "worker", settings.log_format)
        from worker.app import build, serve
        from worker.host import WorkerHost

        host = WorkerHost(settings)
        require_current_schema(host.store)
        app = build(settings, host)
        host.open()
        serve(app)
    except SetupError as error:
        print(f"torchstone worker: {error}", file=sys.stderr)
        return 2
    finally:
        if host is not None:
            host.drain()
            host.close()
    return 0


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
