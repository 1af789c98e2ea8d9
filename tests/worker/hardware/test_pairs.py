"""Processes and the network: streams and turns between two processes, locks, starts, HTTP to a service."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.worker.fresh import call_fresh
from tests.worker.hardware.probing import bench_in, recompute, run_probe
from worker import processes
from worker.hardware.network import Tcp, _measure_http
from worker.hardware.pair import Channel, Pair, ask_all, time_runs
from worker.hardware.probe import ProbeBench, ProbeReport
from worker.hardware.process import Pipes, SharedMemory
from worker.measure.contestant import ContestantFailed

CHANNELS: dict[str, type[Any]] = {"shared_memory": SharedMemory, "pipes": Pipes, "tcp": Tcp}


def _stream(bench: ProbeBench, channel: type[Channel], total_bytes: int) -> ProbeReport:
    report = ProbeReport("pair")
    with Pair.start("pair", bench.cores, channel()) as pair:
        pair.stream(bench, report, "stream", total_bytes=total_bytes, budget_s=0.0, method="test")
        pair.handover(bench, report, "handover", message_bytes=64, budget_s=0.0, method="test")
    assert processes.children(os.getpid()) == []
    return report


@pytest.mark.parametrize("name", list(CHANNELS))
def test_a_stream_arrives_as_it_was_sent(tmp_path: Path, name: str) -> None:
    # A length that is no multiple of any piece.
    report = call_fresh(_stream, bench_in(tmp_path), CHANNELS[name], (5 << 20) + 8)
    recompute(report)
    (check,) = report.checks
    assert check.passed and check.detail == "7 streams of 5242888 bytes, 0 words were not as sent"


class Swapping(Pipes):
    """A pipe that hands over its second piece with one byte wrong."""

    taken = 0

    def take(self, into: memoryview) -> None:
        super().take(into)
        if len(into) == self.chunk_bytes:
            self.taken += 1
            if self.taken % 8 == 2:
                into[11] ^= 1


def test_a_wrong_byte_on_the_way_is_found(tmp_path: Path) -> None:
    report = call_fresh(_stream, bench_in(tmp_path), Swapping, 8 * Pipes.chunk_bytes)
    (check,) = report.checks
    assert not check.passed and check.detail is not None and " 7 words were not as sent" in check.detail


class Dying(Pipes):
    """A pipe whose receiving process is killed by the first piece."""

    def take(self, into: memoryview) -> None:
        if len(into) > 64:
            os.kill(os.getpid(), signal.SIGSEGV)
        super().take(into)


def test_a_process_that_dies_ends_the_other(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(ContestantFailed, match="SIGSEGV"):
        call_fresh(_stream, bench_in(tmp_path), Dying, 16 * Pipes.chunk_bytes)
    assert time.monotonic() - began_s < 20


def _silent(bench: ProbeBench) -> None:
    with Pair.start("pair", bench.cores, Pipes()) as pair:
        ask_all([(pair.first, ("send", {"total_bytes": 8, "seed": 0}))], within_s=0.2)  # nobody receives


def test_whoever_never_answers_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ContestantFailed, match=r"no answer within 0\.2 s"):
        call_fresh(_silent, bench_in(tmp_path))


def _orphaned(bench: ProbeBench) -> list[int]:
    """Both processes of a pair whose starter is killed: those that still live a while later."""
    processes.become_subreaper()
    reading, writing = os.pipe()
    starter = os.fork()
    if starter == 0:
        with Pair.start("pair", bench.cores, SharedMemory()) as pair:
            os.write(writing, f"{pair.first.pid} {pair.second.pid}".encode())
            signal.pause()
        os._exit(0)
    pids = [int(word) for word in os.read(reading, 100).split()]
    assert all(map(processes.is_alive, pids))
    os.kill(starter, signal.SIGKILL)
    for pid in (starter, *pids):
        os.waitpid(pid, 0)
    return [pid for pid in pids if processes.is_alive(pid)]


def test_both_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    assert call_fresh(_orphaned, bench_in(tmp_path)) == []


def test_runs_are_as_long_as_asked_and_of_one_count() -> None:
    asked: list[int] = []

    def run(count: int) -> float:
        asked.append(count)
        return count * 1e-4 + 1e-5

    count, took = time_runs(run, run_s=0.02, budget_s=0.0, first_count=1)
    assert asked == [1, *[count] * 6]
    assert len(took.seconds) == 6 and took.median == pytest.approx(count * 1e-4 + 1e-5)
    asked.clear()
    count, _ = time_runs(run, run_s=0.02, budget_s=1e-2, first_count=1)
    assert asked[:4] == [1, 4, 16, 64] and count == pytest.approx(200, rel=0.02)


def test_processes(tmp_path: Path) -> None:
    report = run_probe("process", bench_in(tmp_path, budget_s=1.6))
    recompute(report)
    found = {reading.name for reading in report.readings}
    streams = {"shared_memory", "pipe", "semaphore_handover", "pipe_handover", "lock_free", "lock_contended"}
    assert streams | {"thread_start", "fork", "exec", "python_start"} <= found
    assert {check.name for check in report.checks} == {"shared_memory_content", "pipe_content", "lock_excludes"}
    assert all(check.passed for check in report.checks)


class Health(BaseHTTPRequestHandler):
    """A service that keeps its connections and says that it is well; below /ill/ that it is not."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self) -> None:
        body = b'{"status":"ok"}'
        self.send_response(503 if self.path.startswith("/ill/") else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def _service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_the_network_and_a_service(tmp_path: Path) -> None:
    with _service() as url:
        report = run_probe("network", bench_in(tmp_path, service_url=f"{url}/"))
    recompute(report)
    assert report.skipped == [] and all(check.passed for check in report.checks)
    found = {(reading.name, reading.at.get("message_bytes")) for reading in report.readings}
    assert {("tcp_stream", None), ("tcp_handover", 8), ("tcp_handover", 4096)} <= found
    assert {("http_latency", None), ("http_requests", None)} <= found


def _ask_service(bench: ProbeBench) -> ProbeReport:
    report = ProbeReport("network")
    _measure_http(bench, report, 0.0)
    return report


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (None, "this worker was not told where the service is"),
        ("http://127.0.0.1:1", "cannot be reached from here"),
        ("ftp://127.0.0.1", "is no http:// or https:// URL"),
        ("ILL", "answered 503"),
    ],
    ids=["none", "closed", "scheme", "ill"],
)
def test_a_service_that_cannot_be_asked_is_skipped(tmp_path: Path, url: str | None, reason: str) -> None:
    with _service() as served:
        if url == "ILL":
            url = f"{served}/ill"
        report = call_fresh(_ask_service, bench_in(tmp_path, service_url=url))
    (skip,) = report.skipped
    assert skip.of == "network.http" and reason in skip.reason
    assert report.readings == [] and report.checks == []
