"""Ten thousand jobs that do nothing, through the whole of it: none lost, none doubled, how quickly, and in what memory.

    python bench/load.py                               # 10,000 jobs, 50 clients
    python bench/load.py --jobs 1000 --clients 10
    python bench/load.py --peers-python ENV/bin/python  # then POSTs to Flower and to MLflow's tracking server, too

A `torchstone up` of its own in a scratch folder, with the diagnostic kind `sleep`. The clients POST as fast as they
are answered, while the worker runs the jobs on the same cores; then they are waited for. Meanwhile one more process
asks for a job and for the list, ten times a second, so their latency is that under load. Memory is each process' own
(resident, no file's), at the start, at the most and at the end. Compare figures only within one run.

The peers are started in the virtual environment that --peers-python names, with `flower` and `mlflow` in it. What is
alike: an HTTP request that is answered once the work (a task, a run) is stored. What is not: neither says so durably
(Flower's broker syncs once a second, MLflow's SQLite runs as it comes), and MLflow runs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import psutil

SPEC = {"kind": "sleep", "devices": {"type": "cpu", "count": 1}}
EVERY_S = 0.1
_LENGTH = re.compile(rb"(?i)content-length: (\d+)")
_READY = re.compile(r"ready in [\d.]+ s: (http://\S+)")


@dataclass
class Latencies:
    """Of one kind of request."""

    name: str
    took_s: list[float] = field(default_factory=list)
    over_s: float = 0.0
    refused: Counter[bytes] = field(default_factory=Counter)
    """Answers that were no success, by their status line and the start of what they say; not among the times."""

    def __str__(self) -> str:
        told = "".join(f"\n  {count:,} times {answer!r}" for answer, count in self.refused.items())
        return self._times() + told

    def _times(self) -> str:
        if len(self.took_s) < 2:
            return f"{self.name:<22} too few answers"
        percentiles = statistics.quantiles(self.took_s, n=100)
        rate = f"{len(self.took_s) / self.over_s:8,.0f}/s" if self.over_s else " " * 10
        p50_ms, p99_ms = percentiles[49] * 1e3, percentiles[98] * 1e3
        return f"{self.name:<22} {len(self.took_s):7,} {rate}   p50 {p50_ms:7.1f} ms   p99 {p99_ms:7.1f} ms"


def own_bytes(process: psutil.Process) -> int:
    """What it has resident that is no file's. (USS, what it alone holds, jumps when a fork ends.)"""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


@dataclass
class Memory(threading.Thread):
    """What each process below `root` holds, looked at twice a second: at the start, the most, and at the end."""

    root: psutil.Process
    held: dict[str, list[int]] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        while not self.over.wait(0.5):
            for process in [self.root, *self.root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    name = _part(process)
                    if name:
                        self.held.setdefault(name, []).append(own_bytes(process))

    def __str__(self) -> str:
        lines = []
        for name, held in sorted(self.held.items()):
            early = statistics.median(held[len(held) // 10 : len(held) // 10 + 5] or held[:1])
            late = statistics.median(held[-5:])
            mb = [f"{value / 1e6:7.1f}" for value in (early, max(held), late)]
            lines.append(f"{name:<22} early {mb[0]} MB   most {mb[1]} MB   late {mb[2]} MB")
        return "\n".join(lines)


def _part(process: psutil.Process) -> str | None:
    """The name of a lasting process; None for a job's own."""
    words = process.cmdline()
    if "valkey-server" in process.name():
        return "broker"
    if "forkserver" in " ".join(words):
        above = process.parent()
        return "forkserver" if above and "forkserver" not in " ".join(above.cmdline()) else None
    if words[-1:] == ["worker"] or words[-1:] == ["service"]:
        return {"worker": "worker", "service": "api"}[words[-1]]
    return None


@contextlib.contextmanager
def torchstone(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`torchstone up`; its URL and process."""
    log = folder / "up.log"
    argv = [sys.executable, "-c", "from torchstone.cli import main; main()", "up", "--port", "0", "--data", str(folder)]
    with log.open("wb") as out:
        environment = {**os.environ, "TORCHSTONE_DIAGNOSTICS": "1", "TORCHSTONE_LOG_LEVEL": "warning"}
        process = subprocess.Popen(argv, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + 120
        while (found := _READY.search(log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield found[1], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


_TLS = httpx.create_ssl_context()
"""Made once: it takes 0.1 s, which with 50 clients would look like the service's."""


Heard = Callable[[bytes], None]


async def post_all(
    url: str, path: str, body: Any, count: int, clients: int, heard: Heard = lambda _: None
) -> Latencies:
    """POST `count` times from `clients` at once; `heard` is given each answer's body.

    Over bare connections: at this rate httpx would be most of what is measured.
    """
    left, latencies = iter(range(count)), Latencies(f"POST {path}")
    where = urlsplit(url)
    content = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    async def one_client() -> None:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        for _ in left:
            begin_s = time.perf_counter()
            writer.write(request)
            answered = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(answered)
            assert length, answered
            answer = await reader.readexactly(int(length[1]))
            if answered[9:10] != b"2":
                latencies.refused[answered.partition(b"\r\n")[0] + b" " + answer[:120]] += 1
                continue
            heard(answer)
            latencies.took_s.append(time.perf_counter() - begin_s)
        writer.close()

    begin_s = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(clients)))
    latencies.over_s = time.perf_counter() - begin_s
    return latencies


@contextlib.contextmanager
def asking(url: str, paths: dict[str, str]) -> Iterator[Callable[[], dict[str, Latencies]]]:
    """Meanwhile GET each of `paths` every EVERY_S, from a process of its own: the clients' is busy with itself.

    Yields what gives the latencies so far, by name; each call begins anew.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_ask, args=(url, paths, theirs), daemon=True)
    process.start()
    ours.recv()  # it is ready

    def so_far() -> dict[str, Latencies]:
        ours.send(None)
        took_s: dict[str, list[float]] = ours.recv()
        return {name: Latencies(f"{name}, meanwhile", took) for name, took in took_s.items()}

    try:
        yield so_far
    finally:
        process.terminate()
        process.join()


def _ask(url: str, paths: dict[str, str], pipe: Connection) -> None:
    took_s: dict[str, list[float]] = {name: [] for name in paths}
    with httpx.Client(base_url=url, timeout=120, verify=_TLS) as http:
        pipe.send("ready")
        while True:
            for name, path in paths.items():
                begin_s = time.perf_counter()
                http.get(path).raise_for_status()
                took_s[name].append(time.perf_counter() - begin_s)
            if pipe.poll(EVERY_S):
                pipe.recv()
                pipe.send(took_s)
                took_s = {name: [] for name in paths}


async def load(url: str, count: int, clients: int) -> None:
    """Submit everything, wait for it, and count what became of it."""
    accepted: list[str] = []

    def accept(body: bytes) -> None:
        accepted.append(orjson.loads(body)["id"])

    begin_s = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=120, verify=_TLS) as http:
        await post_all(url, "/v1/jobs", SPEC, 1, 1, accept)
        with asking(url, {"GET one": f"/v1/jobs/{accepted[0]}", "list of 50": "/v1/jobs?limit=50"}) as so_far:
            posts = await post_all(url, "/v1/jobs", SPEC, count - 1, clients, accept)
            assert not posts.refused, posts
            print("while they are POSTed", posts, *so_far().values(), sep="\n", flush=True)
            while (await http.get("/v1/jobs?state=queued,running&limit=1")).json()["items"]:
                await asyncio.sleep(1)
            took_s = time.perf_counter() - begin_s
            print("while they run", *so_far().values(), sep="\n", flush=True)
        await _check(http, accepted)
    print(f"{count:,} jobs ran in {took_s:.1f} s: {count / took_s:.1f}/s on the same cores")


async def _check(http: httpx.AsyncClient, accepted: list[str]) -> None:
    states: Counter[str] = Counter()
    listed: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await http.get("/v1/jobs", params={"limit": "500", **cursor})).json()
        listed += [job["id"] for job in page["items"]]
        states.update(job["state"] for job in page["items"])
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    several = 0
    for job_id in accepted[:: max(1, len(accepted) // 200)]:
        several += len((await http.get(f"/v1/jobs/{job_id}")).json()["attempts"]) > 1
    lost, unknown = set(accepted) - set(listed), set(listed) - set(accepted)
    doubled = len(listed) - len(set(listed)) + len(accepted) - len(set(accepted))
    print(f"accepted {len(accepted):,}, lost {len(lost)}, doubled {doubled}, never accepted {len(unknown)}")
    print(f"states: {dict(states)}")
    print(f"with more than one attempt, of a sample of about 200: {several}")
    if lost or unknown or doubled or set(states) != {"succeeded"}:
        raise SystemExit("something was lost, doubled, or did not succeed")


# -- the peers --------------------------------------------------------------------------------------------------

_PEER_APP = """
import celery
app = celery.Celery("peer", broker="redis+socket://{socket}?virtual_host=1", backend="redis+socket://{socket}?virtual_host=1")
@app.task(name="nothing")
def nothing(): return None
"""


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 120
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=2).status_code < 500:
                return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"{url} does not answer")
        time.sleep(0.2)


def peers(python: Path, socket: Path, count: int, clients: int) -> None:
    """The same POSTs at Flower (a task each) and at MLflow (a run each)."""
    with tempfile.TemporaryDirectory(prefix="torchstone-peers-") as name:
        folder = Path(name)
        (folder / "peer.py").write_text(_PEER_APP.format(socket=socket))
        requests: dict[str, tuple[list[str], str, str, dict[str, Any]]] = {
            "Flower async-apply": (
                ["-m", "celery", "-A", "peer", "flower", "--port=5599", "--address=127.0.0.1"],
                "http://127.0.0.1:5599",
                "/api/task/async-apply/nothing",
                {"args": []},
            ),
            "MLflow runs/create": (
                ["-m", "mlflow", "server", "--port", "5598", "--backend-store-uri", f"sqlite:///{folder}/m.db"],
                "http://127.0.0.1:5598",
                "/api/2.0/mlflow/runs/create",
                {"experiment_id": "0"},
            ),
        }
        for title, (words, url, path, body) in requests.items():
            environment = {**os.environ, "FLOWER_UNAUTHENTICATED_API": "1"}
            with (folder / "log").open("wb") as out:
                process = subprocess.Popen(
                    [str(python), *words],
                    cwd=folder,
                    env=environment,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            try:
                _wait_for(url, process)
                print(title, asyncio.run(post_all(url, path, body, count, clients)), flush=True)
            finally:
                for each in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        each.kill()
                process.kill()
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--peers-python", type=Path, help="a Python that has flower and mlflow")
    parser.add_argument("--peer-requests", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torchstone-load-") as name, torchstone(Path(name)) as (url, process):
        memory = Memory(process)
        memory.start()
        asyncio.run(load(url, options.jobs, options.clients))
        memory.over.set()
        memory.join()
        print(memory)
        if options.peers_python:
            peers(options.peers_python, Path(name) / "broker.sock", options.peer_requests, options.clients)


if __name__ == "__main__":
    main()
