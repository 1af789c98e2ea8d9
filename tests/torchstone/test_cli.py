"""The command line as a program: quick to start, clear when it refuses. What it does with a service is in test_up."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchstone.processes import VARIABLE
from torchstone import __version__, up
from torchstone.errors import SetupError
from torchstone.settings import Settings

COMMANDS = ("up", "serve", "worker", "migrate", "submit", "get", "watch", "list", "logs", "download", "cancel")
COMMANDS += ("devices", "kinds", "version")


def torchstone(*words: str, cwd: Path, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a folder, with no TORCHSTONE_* variables but these."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHSTONE_") or k == VARIABLE}
    program = [sys.executable, "-c", "from torchstone.cli import main; main()"]
    return subprocess.run(
        [*program, *words],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**environment, **variables},
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children_s() -> float:
    """Processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_every_command_has_help(tmp_path: Path) -> None:
    overview = torchstone("--help", cwd=tmp_path).stdout
    for command in COMMANDS:
        assert f" {command} " in overview
    assert "--port" in torchstone("up", "--help", cwd=tmp_path, COLUMNS="120").stdout


def test_help_is_quick_because_it_imports_next_to_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['torchstone', '--help']\n"
        "from torchstone.cli import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'celery', 'sqlalchemy', 'httpx', 'pydantic', 'fastapi', 'redis'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    took_s = []  # of processor time, which other work on the machine changes little
    for _ in range(3):
        begin_s = children_s()
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        took_s.append(children_s() - begin_s)
        assert done.returncode == 0, done.stderr
    assert min(took_s) < 0.5  # 0.25 s on an idle machine


def test_version(tmp_path: Path) -> None:
    assert torchstone("version", cwd=tmp_path).stdout == f"{__version__}\n"


def test_no_service_is_said_with_the_remedies(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = torchstone("list", "--url", url, cwd=tmp_path)
    assert done.returncode == 1
    assert url in done.stderr
    assert "torchstone up" in done.stderr
    assert "TORCHSTONE_URL" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("word", "stdin", "message"),
    [("missing.json", "", "missing.json: No such file"), ("-", "{", "- is not JSON"), ("broken.json", "", "not JSON")],
)
def test_a_spec_that_cannot_be_read_is_refused(tmp_path: Path, word: str, stdin: str, message: str) -> None:
    (tmp_path / "broken.json").write_text("{'kind'}")
    done = torchstone("submit", word, cwd=tmp_path, stdin=stdin)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    done = torchstone("migrate", cwd=tmp_path, TORCHSTONE_LEASE_S="soon")
    assert done.returncode == 1
    assert "TORCHSTONE_LEASE_S" in done.stderr
    assert "Traceback" not in done.stderr


def test_migrate_twice_and_serve_before_it(tmp_path: Path) -> None:
    refused = torchstone("serve", "--data", "d", "--port", "0", cwd=tmp_path)
    assert refused.returncode == 1
    assert "torchstone migrate" in refused.stderr
    assert "torchstone migrate" in torchstone("worker", "--data", "d", cwd=tmp_path).stderr
    first = torchstone("migrate", "--data", "d", cwd=tmp_path)
    again = torchstone("migrate", "--data", "d", cwd=tmp_path)
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert first.stdout == again.stdout
    assert (tmp_path / "d" / "torchstone.db").exists()


def test_a_database_out_of_reach_is_named_without_its_password(tmp_path: Path) -> None:
    url = f"postgresql://somebody:secret@127.0.0.1:{free_port()}/torchstone"
    done = torchstone("migrate", cwd=tmp_path, TORCHSTONE_DATABASE_URL=url)
    assert done.returncode == 1
    assert "127.0.0.1" in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_busy_port_is_named_with_the_remedy_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = torchstone("up", "--port", str(port), "--data", "d", cwd=tmp_path)
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert "--port 0" in done.stderr
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["up.lock"]


def test_a_data_folder_in_use_is_refused_naming_the_pid(tmp_path: Path) -> None:
    data = tmp_path / "d"
    data.mkdir()
    with up.exclusive(data):
        done = torchstone("up", "--port", "0", "--data", "d", cwd=tmp_path)
        assert done.returncode == 1
        assert f"pid {os.getpid()}" in done.stderr
        assert "--data" in done.stderr
    with up.exclusive(data):
        pass  # free again


def test_a_data_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = torchstone("up", "--port", "0", "--data", "file/d", cwd=tmp_path)
    assert done.returncode == 1
    assert "--data" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    done = torchstone("up", "--host", "192.0.2.1", "--port", "0", "--data", "d", cwd=tmp_path)
    assert done.returncode == 1
    assert "192.0.2.1" in done.stderr
    assert "--host" in done.stderr


def test_port_0_becomes_a_free_port(tmp_path: Path) -> None:
    assert up.with_port(Settings(data=tmp_path, port=0)).port > 1023
    with pytest.raises(SetupError, match="in use"), socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        up.with_port(Settings(data=tmp_path, port=busy.getsockname()[1]))
