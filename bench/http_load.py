"""How many requests the service answers, and how that changes from 100 jobs in the database to 100,000.

    python bench/http_load.py                      # prints a table and the ratios; about a minute
    python bench/http_load.py --clients 1 --seconds 5

One uvicorn process on SQLite (synchronous=FULL) with an embedded broker, in a scratch folder; the clients are one other
process that keeps so many connections busy, so on two cores both share the machine. The larger database has a queue
10,000 deep. Compare figures only within one run: they follow the machine's load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson
import psutil
import uvloop
from sqlalchemy import insert, update

from torchstone import broker
from torchstone.settings import Settings
from torchstone.specs import EXAMPLES, parse_spec
from torchstone.store import Store, migrate
from torchstone.store import jobs as store_jobs
from torchstone.store.jobs import NewJob
from torchstone.store.schema import jobs, results

SPEC = orjson.dumps(EXAMPLES["jit"])
RESULT = orjson.dumps({"schema": 1, "timings": [{"name": "latency", "of": of, "n": 1000} for of in "abc"]}).decode()
QUEUED = 10_000
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass
class Figures:
    """What one load gave."""

    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float  # of the service's process, for each request: does not depend on who else uses the machine

    def __str__(self) -> str:
        latency = f"p50 {self.p50_ms:6.1f} ms   p99 {self.p99_ms:6.1f} ms"
        return f"{self.per_s:8,.0f}/s   {latency}   {self.cpu_us:6,.0f} us of CPU each"


@dataclass
class Api:
    """The service's process."""

    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


class _Client(asyncio.Protocol):
    """One connection that sends its next request when it has the answer to the last."""

    def __init__(self, request: Callable[[], bytes], expected: bytes, latencies_s: list[float]) -> None:
        self.request, self.expected, self._latencies_s = request, expected, latencies_s
        self.stopping = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one, though not by class

    def send(self) -> None:
        self._received = b""
        self._sent_s = time.perf_counter()
        self.transport.write(self.request())

    def data_received(self, data: bytes) -> None:
        self._received += data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        length = _LENGTH.search(self._received, 0, head_end)
        assert length is not None, self._received[:200]
        if len(self._received) < head_end + 4 + int(length[1]):
            return
        assert self._received[9:12] == self.expected, self._received[:400]
        self._latencies_s.append(time.perf_counter() - self._sent_s)
        if not self.stopping:
            self.send()


async def _load(api: Api, request: Callable[[], bytes], expected: bytes, clients: int, seconds: float) -> Figures:
    latencies_s: list[float] = []
    loop = asyncio.get_running_loop()
    connections = [_Client(_get("/healthz"), b"200", latencies_s) for _ in range(clients)]
    for connection in connections:
        connection.stopping = True
        await loop.create_connection(lambda connection=connection: connection, "127.0.0.1", api.port)  # type: ignore[misc]
        connection.send()
    while len(latencies_s) < clients:  # the server takes new connections one at a time, between requests
        await asyncio.sleep(0.01)
    for connection in connections:
        connection.stopping, connection.request, connection.expected = False, request, expected
        connection.send()
    await asyncio.sleep(min(1.0, seconds / 4))  # warm
    latencies_s.clear()
    begin_s, begin_cpu_s = time.perf_counter(), api.cpu_s()
    await asyncio.sleep(seconds)
    took_s, cpu_s, measured = time.perf_counter() - begin_s, api.cpu_s() - begin_cpu_s, sorted(latencies_s)
    for connection in connections:
        connection.stopping = True
    await asyncio.sleep(0.3)
    for connection in connections:
        connection.transport.close()
    if len(measured) < 2:
        raise SystemExit("the service answered hardly anything")
    percentiles = statistics.quantiles(measured, n=100)
    return Figures(len(measured) / took_s, percentiles[49] * 1e3, percentiles[98] * 1e3, cpu_s / len(measured) * 1e6)


def _get(path: str) -> Callable[[], bytes]:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    return lambda: request


def _post() -> Callable[[], bytes]:
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(SPEC)}\r\n"
    request = f"{head}Content-Type: application/json\r\n\r\n".encode() + SPEC
    return lambda: request


def fill(store: Store, count: int) -> tuple[str, str]:
    """Store `count` jobs, up to half of them queued; the id of a finished one and of the last in the queue."""
    spec = parse_spec(orjson.loads(SPEC))
    new = [NewJob.of(spec) for _ in range(count)]
    queued = min(QUEUED, count // 2)
    finished = [job.job_id for job in new[:-queued]]
    for begin in range(0, count, 2000):
        with store.write() as conn:
            store_jobs.insert_many(conn, new[begin : begin + 2000])
            ended = finished[begin : begin + 2000]
            if ended:
                conn.execute(update(jobs).where(jobs.c.id.in_(ended)).values(state="succeeded", attempt=1))
                conn.execute(insert(results), [{"job_id": job_id, "result": RESULT} for job_id in ended])
    return finished[len(finished) // 2], new[-1].job_id


@contextlib.contextmanager
def service(settings: Settings) -> Iterator[Api]:
    """The service and its broker as processes."""
    environment = {**os.environ, **settings.environment()}
    parts: list[subprocess.Popen[Any]] = [subprocess.Popen(broker.prepare(settings), stdout=subprocess.DEVNULL)]
    try:
        argv = [sys.executable, "-P", "-m", "service"]
        api = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
        parts.append(api)
        assert api.stderr is not None
        line = api.stderr.readline()
        found = re.search(r"http://[^ ]*:(\d+)", line)
        if found is None:
            raise SystemExit(f"the service did not start: {line}{api.stderr.read()}")
        time.sleep(1.5)  # the bell gets ready
        yield Api(int(found[1]), psutil.Process(api.pid))
    finally:
        for part in reversed(parts):
            part.terminate()
            part.wait(10)


def measure(rows: int, clients: int, seconds: float) -> dict[str, Figures]:
    """Every load against a database of so many jobs."""
    with tempfile.TemporaryDirectory(prefix="torchstone-bench-") as folder:
        settings = Settings(data=Path(folder), port=0)
        migrate(settings.database_url)
        store = Store(settings.database_url)
        finished, queued = fill(store, rows)
        store.dispose()
        loads = {
            "healthz": (_get("/healthz"), b"200"),
            "GET one, finished": (_get(f"/v1/jobs/{finished}"), b"200"),
            "GET one, queued": (_get(f"/v1/jobs/{queued}"), b"200"),
            "list of 50": (_get("/v1/jobs"), b"200"),
            "list by state": (_get("/v1/jobs?state=succeeded&limit=50"), b"200"),
            "POST": (_post(), b"202"),
        }
        figures = {}
        print(f"\n{rows:,} jobs, {min(QUEUED, rows // 2):,} of them queued; {clients} clients")
        with service(settings) as api:
            for name, (request, expected) in loads.items():
                figures[name] = uvloop.run(_load(api, request, expected, clients, seconds))
                print(f"  {name:<18} {figures[name]}", flush=True)
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rows", type=int, nargs=2, default=[100, 100_000], metavar=("FEW", "MANY"))
    options = parser.parse_args()
    few, many = (measure(rows, options.clients, options.seconds) for rows in options.rows)
    print(f"\nrequests/s at {options.rows[1]:,} jobs over those at {options.rows[0]:,}")
    for name in few:
        print(f"  {name:<18} {many[name].per_s / few[name].per_s:5.2f}")


if __name__ == "__main__":
    main()
