"""Every command and every health check of docker-compose.yml, run without Docker on the real programs.

Host names of services become 127.0.0.1, their ports become free ones, volumes become folders; nothing else of a command
is changed. PostgreSQL and Valkey run as they would in their images. The order is that of `depends_on`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from redis import Redis, RedisError

from tests.conftest import PostgreSQL, postgresql_server
from tests.running import PROGRAM
from tests.torchstone.processes import VARIABLE, Mark, marked, wait_until
from torchstone.broker import find_server
from torchstone.client import Client
from torchstone.settings import Settings

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_the_services_and_what_they_wait_for() -> None:
    assert set(SERVICES) == {"postgres", "valkey", "migrate", "api", "worker"}
    for name, service in SERVICES.items():
        assert service["command"], name
        for other, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], f"{name} waits for {other}, which has no health check"


def test_every_named_volume_is_declared() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in COMPOSE["volumes"]


def test_every_variable_is_a_setting() -> None:
    for name in ("migrate", "api", "worker"):
        for variable in SERVICES[name]["environment"]:
            assert variable.removeprefix("TORCHSTONE_").lower() in Settings.model_fields


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_runs_becomes_healthy_and_together_they_do_a_job(tmp_path: Path) -> None:
    with postgresql_server() as server, marked() as mark, contextlib.ExitStack() as stack:
        local = Local(tmp_path, mark, server)
        for name in _in_order():
            process = stack.enter_context(local.started(name))
            if name == "migrate":
                assert process.wait(60) == 0, local.log(name)
            elif "healthcheck" in SERVICES[name]:
                wait_until(lambda n=name: local.is_healthy(n), 60, lambda n=name: f"{n}:\n{local.log(n)}")  # type: ignore[misc]
        with Client(f"http://127.0.0.1:{local.ports[8000]}") as client:
            hosts = lambda: [host["name"] for host in client.devices() if host["state"] == "up"]  # noqa: E731
            wait_until(lambda: hosts() == ["worker"], 60, lambda: local.log("worker"))
            job = client.submit({"kind": "jit", "model": {"preset": "mlp"}, "calls": 100})
            assert client.wait(job["id"], timeout_s=60)["state"] == "succeeded"
            client.download(job["id"], "script.pt", tmp_path / "script.pt")
    mark.wait_until_gone(within_s=2)


class Local:
    """The compose file's services as this machine can run them."""

    def __init__(self, folder: Path, mark: Mark, server: PostgreSQL) -> None:
        self.folder, self.mark, self.server = folder, mark, server
        self.ports = _free_ports([5432, 6379, 8000])
        self.programs = {
            "torchstone": PROGRAM,
            "python": [sys.executable],
            "valkey-server": [str(find_server(Settings()))],
            "postgres": [str(server.binaries / "postgres")],
            "pg_isready": [str(server.binaries / "pg_isready")],
        }

    @contextlib.contextmanager
    def started(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """The service's own command; ended at the end, by SIGTERM as Docker does."""
        argv = self.argv(SERVICES[name]["command"])
        options: dict[str, Any] = {"cwd": self.folder}
        if name == "postgres":
            options, more = self._as_the_image_does()
            argv += more
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(argv, env=self.environment(name), stdout=log, stderr=log, **options)
        try:
            yield process
        finally:
            # SIGINT is the image's own STOPSIGNAL: a fast shutdown.
            process.send_signal(signal.SIGINT if name == "postgres" else signal.SIGTERM)
            process.wait(30)

    def is_healthy(self, name: str) -> bool:
        """The health check's own command; Valkey's client is not at hand, so its words are sent by redis-py."""
        how, *words = SERVICES[name]["healthcheck"]["test"]
        assert how == "CMD"
        if words[0] == "valkey-cli":
            with Redis(port=int(self.local(words[2])), socket_timeout=1) as client, contextlib.suppress(RedisError):
                return client.execute_command(words[3].upper()) is not None  # type: ignore[no-untyped-call]
            return False
        return subprocess.run(self.argv(words), capture_output=True, check=False, timeout=10).returncode == 0

    def argv(self, words: list[str]) -> list[str]:
        return [*self.programs[words[0]], *map(self.local, words[1:])]

    def environment(self, name: str) -> dict[str, str]:
        own = {key: self.local(str(value)) for key, value in SERVICES[name].get("environment", {}).items()}
        if "hostname" in SERVICES[name]:
            own["TORCHSTONE_HOST_NAME"] = SERVICES[name]["hostname"]
        inherited = {k: v for k, v in self.mark.environment.items() if not k.startswith("TORCHSTONE_") or k == VARIABLE}
        return {**inherited, **own}

    def local(self, word: str) -> str:
        """A word with this machine's ports, address and folders in place of the containers'."""
        for port, free in self.ports.items():
            word = re.sub(rf"(?<!\d){port}(?!\d)", str(free), word)
        word = word.replace("@postgres:", "@127.0.0.1:").replace("//valkey:", "//127.0.0.1:")
        return word.replace("/srv/torchstone", str(self.folder / "srv"))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _as_the_image_does(self) -> tuple[dict[str, Any], list[str]]:
        """What the image's entry point does: a database for the user of the environment, and another user than root."""
        own = SERVICES["postgres"]["environment"]
        with psycopg.connect(self.server.url("postgres").replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(
                f"CREATE ROLE {own['POSTGRES_USER']} LOGIN PASSWORD '{own['POSTGRES_PASSWORD']}'".encode()
            )
            connection.execute(f"CREATE DATABASE {own['POSTGRES_DB']} OWNER {own['POSTGRES_USER']}".encode())
        self.server.stop()
        folder = self.server.folder
        owner = folder.stat()
        options: dict[str, Any] = {"cwd": folder}
        if owner.st_uid != os.getuid():
            options |= {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
        where = ["-D", str(folder / "data"), "-k", str(folder), "-h", "127.0.0.1", "-p", str(self.ports[5432])]
        return options, where


def _in_order() -> list[str]:
    """The services, each after those that it depends on."""
    order: list[str] = []
    while len(order) < len(SERVICES):
        order += [n for n, s in SERVICES.items() if n not in order and set(s.get("depends_on", {})) <= set(order)]
    return order


def _free_ports(ports: list[int]) -> dict[int, int]:
    """A free port of this machine for every port of a container."""
    with contextlib.ExitStack() as stack:
        free = {}
        for port in ports:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            free[port] = probe.getsockname()[1]
        return free
