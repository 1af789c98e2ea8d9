"""`torchstone up` with all its real parts: it stops, it restarts what crashes, it leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.running import PROGRAM, running
from tests.torchstone.processes import wait_until
from torchstone.client import Client

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

MLP = {"kind": "jit", "model": {"preset": "mlp"}, "calls": 100}
LONG = {"kind": "jit", "model": {"preset": "mlp"}, "calls": None, "ci_half_width": 1e-9, "budget_s": 600}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_within_seconds_even_amid_a_job(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path / "d") as up, Client(up.url) as client:
        job = client.submit(LONG)
        wait_until(lambda: client.job(job["id"])["state"] == "running", within_s=30)
        begin_s = time.monotonic()
        up.process.send_signal(number)
        assert up.process.wait(30) == 0
        assert time.monotonic() - begin_s < 12
        up.mark.wait_until_gone(within_s=0.5)
    assert "was killed" not in up.output()
    # The job was handed back, not failed: it runs when its worker is there again.
    with running(tmp_path / "d") as up, Client(up.url) as client:
        wait_until(lambda: client.job(job["id"])["state"] == "running", within_s=60)
        assert [a["outcome"] for a in client.job(job["id"])["attempts"]] == ["returned", None]
        client.cancel(job["id"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent-death signal")
def test_nothing_outlives_a_killed_supervisor_and_up_starts_again(tmp_path: Path) -> None:
    with running(tmp_path / "d") as up, Client(up.url) as client:
        job = client.submit(LONG)
        wait_until(lambda: client.job(job["id"])["state"] == "running", within_s=30)
        up.process.kill()
        up.process.wait(10)
        up.mark.wait_until_gone(within_s=5)
    with running(tmp_path / "d") as up, Client(up.url) as client:
        wait_until(lambda: client.job(job["id"])["state"] == "running", within_s=60)  # the same job, once more
        client.cancel(job["id"])
        assert client.wait(job["id"], timeout_s=60)["state"] == "canceled"


@pytest.mark.parametrize("part", ["valkey-server", "service", "worker"])
def test_a_crashed_part_is_restarted_says_so_and_jobs_run_again(tmp_path: Path, part: str) -> None:
    name = {"valkey-server": "broker", "service": "api", "worker": "worker"}[part]
    with running(tmp_path / "d") as up, Client(up.url) as client:
        assert client.wait(client.submit(MLP)["id"], timeout_s=60)["state"] == "succeeded"
        up.part(part).kill()
        up.wait_for_output(rf"{name} was killed by SIGKILL; restart 1 in 0\.5 s", within_s=10)
        up.wait_for_output(rf"{name} is ready again \(restart 1\)", within_s=60)
        assert client.wait(client.submit(MLP)["id"], timeout_s=60)["state"] == "succeeded"


def test_a_second_up_on_the_same_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with running(tmp_path / "d") as up:
        second = subprocess.run(
            [*PROGRAM, "up", "--port", up.url.rpartition(":")[2], "--data", str(tmp_path / "d")],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert second.returncode == 1
        assert f"pid {up.process.pid}" in second.stderr
        assert httpx.get(f"{up.url}/readyz").status_code == 200


def test_two_ups_on_two_folders_do_not_meet(tmp_path: Path) -> None:
    names = {"TORCHSTONE_HOST_NAME": "second"}
    with (
        running(tmp_path / "a") as a,
        running(tmp_path / "b", **names) as b,
        Client(a.url) as one,
        Client(b.url) as two,
    ):
        job = one.submit(MLP)
        assert one.wait(job["id"], timeout_s=60)["state"] == "succeeded"
        assert list(two.list()) == []
        assert [host["name"] for host in two.devices()] == ["second"]


def test_jobs_and_results_survive_a_restart(tmp_path: Path) -> None:
    with running(tmp_path / "my data") as up, Client(up.url) as client:  # with a space in its name
        job = client.wait(client.submit(MLP)["id"], timeout_s=60)
    with running(tmp_path / "my data") as up, Client(up.url) as client:
        assert client.job(job["id"])["result"] == job["result"]
        path = client.download(job["id"], "script.pt", tmp_path / "script.pt")
        assert path.stat().st_size > 100_000


def test_a_broker_given_by_url_is_used_and_none_is_started(tmp_path: Path) -> None:
    with running(tmp_path / "a") as up:
        url = f"redis+socket://{tmp_path / 'a' / 'broker.sock'}?virtual_host=1"
        with (
            running(tmp_path / "b", TORCHSTONE_BROKER_URL=url, TORCHSTONE_HOST_NAME="b") as other,
            Client(other.url) as c,
        ):
            with pytest.raises(AssertionError, match="no part valkey-server"):
                other.part("valkey-server")
            assert not (tmp_path / "b" / "broker").exists()
            assert c.wait(c.submit(MLP)["id"], timeout_s=60)["state"] == "succeeded"
        assert up.part("valkey-server").is_running()


def test_serve_and_worker_alone_are_the_same_parts(tmp_path: Path) -> None:
    """The API of `up`, and a second worker started by `torchstone worker` under a name of its own."""
    with running(tmp_path / "d", "--devices", "cpu:0") as up, Client(up.url) as client:
        environment = {**up.mark.environment, "TORCHSTONE_HOST_NAME": "second", "TORCHSTONE_WORK": str(tmp_path / "w")}
        log = (tmp_path / "worker.log").open("wb")
        worker = subprocess.Popen(
            [*PROGRAM, "worker", "--devices", "cpu:1", "--data", str(tmp_path / "d")],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        log.close()
        wait_until(lambda: "is ready" in (tmp_path / "worker.log").read_text(), within_s=60)
        assert {host["name"] for host in client.devices() if host["state"] == "up"} >= {"second"}
        worker.send_signal(signal.SIGINT)
        assert worker.wait(20) == 0
        # Told by the worker itself or, where it had no time for that, by its lease.
        wait_until(lambda: {h["name"]: h["state"] for h in client.devices()}["second"] != "up", within_s=45)


def test_the_demo(tmp_path: Path) -> None:
    """`make demo` from a clean environment: exit code 0 only if everything that it says was true."""
    root = Path(__file__).parents[1]
    if not (root / ".venv" / "bin" / "torchstone").exists():
        pytest.skip("the demo runs from .venv: make setup")
    done = subprocess.run([root / "demo" / "demo.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no process is left" in done.stdout
