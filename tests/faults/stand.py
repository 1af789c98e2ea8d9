"""A whole Torchstone for faults: `torchstone up` with short leases, and what must be true once a fault is over.

with standing(tmp_path) as stand:
    job_id = stand.submit(seconds=2)
    stand.up.part("worker").kill()
    stand.settle([job_id])          # all ended, nobody ran twice, nothing left, nothing leased, the next one runs
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.conftest import PostgreSQL
from tests.running import Running, running
from tests.torchstone.processes import wait_until
from torchstone.client import Client
from torchstone.errors import Unavailable
from torchstone.jobs import is_terminal
from torchstone.settings import Settings

LEASE_S = 6.0
MEMORY_BYTES = 300 << 20
SHORT: dict[str, str] = {
    "TORCHSTONE_DIAGNOSTICS": "1",
    "TORCHSTONE_HOST_NAME": "first",
    "TORCHSTONE_LEASE_S": str(LEASE_S),
    "TORCHSTONE_FENCE_S": "4",
    "TORCHSTONE_HEARTBEAT_S": "0.5",
    "TORCHSTONE_RECONCILE_S": "0.5",
    "TORCHSTONE_POLL_S": "0.5",
    "TORCHSTONE_RING_AGAIN_S": "1",
    "TORCHSTONE_KILL_GRACE_S": "0.5",
    "TORCHSTONE_DRAIN_S": "0.5",
    "TORCHSTONE_MAX_ATTEMPTS": "5",
    "TORCHSTONE_CPU_DEVICES": "2",
}


@dataclass
class Stand:
    """A running Torchstone, and a client of it that puts up with outages."""

    up: Running
    client: Client
    data: Path
    environment: dict[str, str]
    submitted: list[str] = field(default_factory=list)
    server: PostgreSQL | None = None
    roots: list[int] = field(default_factory=list)
    """Beside `up`: supervisors of further workers."""

    def settings(self) -> Settings:
        return Settings(data=self.data)

    def submit(self, within_s: float = 30, **fields: Any) -> str:
        """The id of a `sleep` job that was accepted, however often that had to be tried (under one key)."""
        spec = {"kind": "sleep", "devices": {"type": "cpu", "count": 1}, **fields}
        key = f"{time.monotonic_ns()}"
        deadline_s = time.monotonic() + within_s
        while True:
            with contextlib.suppress(Unavailable):
                job_id: str = self.client.submit(spec, idempotency_key=key)["id"]
                self.submitted.append(job_id)
                return job_id
            assert time.monotonic() < deadline_s, f"no job was accepted:\n{self.up.output()[-4000:]}"
            time.sleep(0.05)

    def job(self, job_id: str) -> dict[str, Any]:
        """The job as soon as the service answers."""
        deadline_s = time.monotonic() + 40
        while True:
            with contextlib.suppress(Unavailable, httpx.TransportError):
                return self.client.job(job_id)
            assert time.monotonic() < deadline_s, f"the service does not answer:\n{self.up.output()[-4000:]}"
            time.sleep(0.05)

    def wait_for_state(self, job_id: str, state: str, within_s: float = 40) -> None:
        wait_until(
            lambda: self.job(job_id)["state"] == state,
            within_s,
            lambda: f"not {state}: {self.job(job_id)}\n{self.up.output()[-4000:]}",
        )

    def running(self, **fields: Any) -> str:
        """A job that has begun: its process has said how far it is."""
        job_id = self.submit(**fields)
        wait_until(lambda: self.job(job_id)["progress"], 40, lambda: f"{self.job(job_id)}\n{self.up.output()[-4000:]}")
        return job_id

    def wait_until_whole(self) -> None:
        """Every part is there and answers: jobs go on without a broker that the last fault killed, and end before it
        is back."""

        def is_whole() -> bool:
            with contextlib.suppress(AssertionError, Unavailable, httpx.TransportError, psutil.Error):
                for module in ("service", "worker", "valkey-server"):
                    self.up.part(module)
                return httpx.get(f"{self.up.url}/readyz", timeout=5).status_code == 200
            return False

        wait_until(is_whole, 60, lambda: f"not whole again:\n{self.up.output()[-4000:]}")

    def settle(self, job_ids: Sequence[str], within_s: float = 60) -> list[dict[str, Any]]:
        """What must be true of these jobs once a fault is over; the jobs as they ended."""
        ended = [self._ended(job_id, within_s) for job_id in job_ids]
        for job in ended:
            _check_attempts(job)
            assert "another process runs this very job" not in str(job["error"]), job
        following = self._ended(self.submit(), within_s)
        assert following["state"] == "succeeded", following
        wait_until(lambda: not self.held(), 20, lambda: f"still leased: {self.held()}")
        wait_until(lambda: not self.strays(), 10, lambda: f"left behind: {self.strays()}")
        return ended

    def _ended(self, job_id: str, within_s: float) -> dict[str, Any]:
        wait_until(
            lambda: is_terminal(self.job(job_id)["state"]),
            within_s,
            lambda: f"has not ended: {self.job(job_id)}\n{self.up.output()[-6000:]}",
        )
        return self.job(job_id)

    def held(self) -> list[Any]:
        """The leases that `GET /v1/devices` shows."""
        return [device["held_by"] for host in self.client.devices() for device in host["devices"] if device["held_by"]]

    def strays(self) -> list[list[str]]:
        """Processes of ours that are nobody's: not below `up`, or below a forkserver while no job runs."""
        found = []
        for process in self.up.mark.processes():
            with contextlib.suppress(psutil.Error):
                above = process.parents()
                if not {self.up.process.pid, *self.roots} & {process.pid, *(each.pid for each in above)}:
                    found.append(["no parent", *process.cmdline()])
                if above and "forkserver" in " ".join(above[0].cmdline()):
                    found.append(["of a job", *process.cmdline()])
        return found

    def job_processes(self) -> list[psutil.Process]:
        """The processes of the jobs that run now, each the leader of its session."""
        found = []
        for process in self.up.part("worker").children(recursive=True):
            with contextlib.suppress(psutil.Error):
                above = process.parent()
                if above is not None and "forkserver" in " ".join(above.cmdline()):
                    found.append(process)
        return found


def _check_attempts(job: dict[str, Any]) -> None:
    """One attempt after the other, each ended, at most one of them with a result."""
    attempts = job["attempts"]
    assert all(attempt["finished_at"] for attempt in attempts), job
    assert all(before["finished_at"] <= after["started_at"] for before, after in pairwise(attempts)), job
    outcomes = [attempt["outcome"] for attempt in attempts]
    assert set(outcomes[:-1]) <= {"lost", "returned"}, job
    if job["state"] == "succeeded":
        assert outcomes[-1] == "succeeded" and job["result"] is not None, job


@contextlib.contextmanager
def standing(data: Path, **variables: str) -> Iterator[Stand]:
    """Start it; at the end it stops in order, with no process left."""
    environment = {**SHORT, **variables}
    with running(data, **environment) as up, Client(up.url) as client:
        yield Stand(up, client, data, environment)
