"""Run the service: `python -m service`, configured by TORCHSTONE_* (torchstone.settings).

Exit codes: 0 stopped on request, 2 it cannot start as asked (the schema is not current, the port is taken, ...).
"""

# ruff: noqa: E402
from __future__ import annotations

import gc

gc.disable()  # until all is loaded: of what is loaded nothing is garbage, and looking costs a tenth of the start

import signal
import socket
import sys
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI

from service.app import create_app
from torchstone.errors import SetupError
from torchstone.logging_setup import configure_logging
from torchstone.settings import Settings
from torchstone.store import Store, require_current_schema
from torchstone.store.artifacts import Blobs

log = structlog.get_logger("service")
_STOP_WITHIN_S = 3


class _Server(uvicorn.Server):
    """Sends long polls and event streams home before it waits for the connections to end."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        runtime = getattr(self._app.state, "runtime", None)
        if runtime is not None:
            runtime.release()
        super().handle_exit(sig, frame)


def main() -> int:
    """Serve until SIGINT or SIGTERM."""
    try:
        settings = Settings.load()
        configure_logging(settings.log_level, "api", settings.log_format)
        _check_schema(settings)
        Blobs(settings.artifacts_url)  # a URL that cannot be opened is told here, before anything is started
        listener = _listen(settings)
    except SetupError as error:
        return _refuse(str(error))
    host, port = listener.getsockname()[:2]
    settings = settings.model_copy(update={"port": port})
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",  # there are no WebSockets; their library would be loaded at every start
        timeout_graceful_shutdown=_STOP_WITHIN_S,
        timeout_keep_alive=30,
    )
    shown = f"[{host}]" if ":" in host else host
    log.info("listening", url=f"http://{shown}:{port}")
    # uvicorn, once it has stopped, raises the signal again that stopped it; a stop on request is no failure.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda *_: None)
    # What is loaded now stays. A full collection that looks at all of it again stops every request for 0.1 s.
    gc.freeze()
    gc.enable()
    with listener:
        _Server(config, app).run(sockets=[listener])
    return 0


def _check_schema(settings: Settings) -> None:
    store = Store(settings.database_url)
    try:
        require_current_schema(store)
    finally:
        store.dispose()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise SetupError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from error


def _refuse(message: str) -> int:
    print(f"torchstone: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
