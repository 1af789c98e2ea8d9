"""Start Torchstone's parts: everything on this machine (`up`), the API alone (`serve`), a worker alone (`worker`).

    up(Settings(data=Path("/srv/torchstone"), port=0))     # until SIGINT or SIGTERM; returns an exit code

`up` is one command and one terminal: it takes the data folder for itself, brings the database to the newest schema,
then starts broker, API and worker in this order, each once the one before is ready. What an explicit
TORCHSTONE_BROKER_URL or TORCHSTONE_DATABASE_URL names is used instead of the embedded part. The parts are started as
modules by name; nothing of them is imported here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import http.client
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchstone import __version__, broker
from torchstone.errors import SetupError
from torchstone.settings import Settings
from torchstone.supervisor import Part, Supervisor

if TYPE_CHECKING:
    from torchstone.store import Store

# Valkey's warning at every start matters to servers of gigabytes, not to a queue of doorbells; its goodbyes to nobody.
_BROKER_HUSH = ("Memory overcommit must be enabled", "scheduling shutdown", "ready to exit")
_UP_DRAIN_S = 2.0
_PROBE_WITHIN_S = 1.0


def up(settings: Settings) -> int:
    """Run everything until a stop signal. Raises SetupError where it cannot start as asked."""
    begin_s = time.monotonic()
    if "drain_s" not in settings.model_fields_set:
        # Nobody else could take the jobs over, so waiting for a lull only delays the end of all.
        settings = settings.model_copy(update={"drain_s": _UP_DRAIN_S})
    with exclusive(settings.data):
        settings = with_port(settings)
        parts = [api_part(settings), worker_part(settings, Registration(settings))]
        if broker.is_embedded(settings):
            parts.insert(0, broker_part(settings))
        supervisor = Supervisor(parts)
        supervisor.say(f"Torchstone {__version__}, data in {settings.data}")
        migrate(settings)
        return supervisor.run(on_ready=lambda: _announce(supervisor, settings, time.monotonic() - begin_s))


def serve(settings: Settings) -> NoReturn:
    """Become the API's process; the database must have the newest schema already."""
    settings = with_port(settings)
    _require_current_schema(settings)
    sys.stdout.flush()
    argv = _module("service")
    os.execve(argv[0], argv, {**os.environ, **settings.environment()})


def worker(settings: Settings) -> int:
    """Run this host's worker until a stop signal, and start it again when it crashes."""
    _require_current_schema(settings)
    supervisor = Supervisor([worker_part(settings, StoredRegistration(settings))])
    ready = f"worker {settings.host_name} is ready; Ctrl-C stops it"
    return supervisor.run(on_ready=lambda: supervisor.say(ready))


def migrate(settings: Settings) -> str:
    """Bring the database to the newest schema; the revision it is at."""
    from torchstone.store import migrate as migrate_database

    with _database(settings):
        return migrate_database(settings.database_url)


def broker_part(settings: Settings) -> Part:
    """The embedded Valkey."""
    return Part("broker", lambda: broker.prepare(settings), ready=lambda: broker.answers(settings), hush=_BROKER_HUSH)


def api_part(settings: Settings) -> Part:
    """The HTTP service, ready when it says so itself."""
    return Part(
        "api",
        _module("service"),
        settings.environment(),
        ready=lambda: _get_json(settings, "/readyz") is not None,
        ready_within_s=60,
        grace_s=5,
    )


def worker_part(settings: Settings, registration: Registration | StoredRegistration) -> Part:
    """This host's worker, ready once it has registered anew."""

    def argv() -> list[str]:
        registration.remember()
        return _module("worker")

    return Part(
        "worker",
        argv,
        settings.environment(),
        ready=registration.is_new,
        ready_within_s=120,
        grace_s=settings.stopped_within_s,
    )


class Registration:
    """Whether this host's worker registered since `remember`, as GET /v1/devices tells."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: object = None

    def remember(self) -> None:
        self._known = self._current()

    def is_new(self) -> bool:
        current = self._current()
        return current is not None and current != self._known

    def _current(self) -> object:
        body = _get_json(self._settings, "/v1/devices") or {}
        for host in body.get("items", []):
            if host["name"] == self._settings.host_name and host["state"] == "up":
                return host["registered_at"]
        return None


class StoredRegistration(Registration):
    """The same, asked of the database: where a worker runs alone, there may be no API to ask."""

    def _current(self) -> object:
        from torchstone.store import hosts

        with contextlib.suppress(SetupError), _database(self._settings) as store, store.read() as conn:
            row = hosts.find(conn, self._settings.host_name)
            return row["incarnation"] if row and row["state"] == "up" else None
        return None


@contextlib.contextmanager
def exclusive(data: Path) -> Iterator[None]:
    """Hold the data folder for this process. Raises SetupError, naming the pid, while another one holds it."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        lock = (data / "up.lock").open("a+")
    except OSError as error:
        raise SetupError(
            f"the data folder {data} cannot be used: {error.strerror}; choose another with --data"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise SetupError(
                f"{data} is in use by another `torchstone up` (pid {holder}); "
                "stop that one, or choose another folder with --data"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def with_port(settings: Settings) -> Settings:
    """The settings with a port that is free now: the one asked for, or any where 0 was asked for.

    Raises SetupError where the port asked for is taken or not allowed.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise SetupError(_why_no_port(settings, error)) from None
        if settings.port == 0:
            return settings.model_copy(update={"port": probe.getsockname()[1]})
    return settings


def _why_no_port(settings: Settings, error: OSError) -> str:
    where = f"port {settings.port} on {settings.host}"
    remedy = "choose another with --port, or --port 0 for any free one"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use by another program; stop that one, or {remedy}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{where} may not be used by this user; {remedy}"
    return f"cannot listen on {settings.host}: {error.strerror or error}; choose another address with --host"


def _announce(supervisor: Supervisor, settings: Settings, took_s: float) -> None:
    shown = settings.public_url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    supervisor.say(f"ready in {took_s:.1f} s: {shown}  (API reference: {shown}/docs)")
    supervisor.say("Ctrl-C stops everything")


def _require_current_schema(settings: Settings) -> None:
    from torchstone.store import require_current_schema

    with _database(settings) as store:
        require_current_schema(store)


@contextlib.contextmanager
def _database(settings: Settings) -> Iterator[Store]:
    """The database for a moment. Raises SetupError, naming it without its password, where it is out of reach."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import SQLAlchemyError

    from torchstone.store import Store

    try:
        store = Store(settings.database_url)
        try:
            yield store
        finally:
            store.dispose()
    except SQLAlchemyError as error:
        where = make_url(settings.database_url).render_as_string()
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise SetupError(f"the database {where} cannot be used: {reason}") from error


def _module(name: str) -> list[str]:
    """A part of ours as a program. -P: a folder of the same name where the user stands must not be taken for it."""
    return [sys.executable, "-P", "-m", name]


def _get_json(settings: Settings, path: str) -> dict[str, Any] | None:
    """The API's answer where it is a 200, else None. Not through a proxy: it is this machine's own part."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.host, settings.host)
    connection = http.client.HTTPConnection(host, settings.port, timeout=_PROBE_WITHIN_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        return dict(json.loads(body)) if response.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
