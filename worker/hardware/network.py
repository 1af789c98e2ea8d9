"""Probe `network`: TCP between two processes of this host, and HTTP to the service itself.

Figures: `tcp_stream` over the loopback interface, `tcp_handover` (8 and 4,096 bytes, half of the way there and back);
`http_latency` of GET /healthz over one connection that is kept, `http_requests` a second over several.

Loopback never meets a network card: it is the ceiling of what software may cost, not of a wire. The service shares this
machine's cores with those who ask it, and may be busy with others. Content is compared, answers are checked.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from worker.hardware.pair import Pair, ask_all, closing, span_s, time_runs
from worker.hardware.probe import ProbeBench, ProbeReport
from worker.measure.contestant import Contestant, ContestantFailed

STREAM_BYTES = 32 << 20
_PARTS = 5
_ANSWER_WITHIN_S = 5.0
_CONNECTIONS = 4
"""Of each process that asks at full load."""
_MOST_ASKERS = 4
_RUN_S = 0.1
_NUMBER = struct.Struct("=Q")


class Tcp:
    """A connection over loopback, both ends of which are made here."""

    chunk_bytes = 1 << 18

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
            one = socket.create_connection(listener.getsockname(), timeout=_ANSWER_WITHIN_S)
            listener.settimeout(_ANSWER_WITHIN_S)
            other, peer = listener.accept()
        self._ends = (one, other)
        if peer != one.getsockname():  # another process of this machine was quicker
            self.close()
            raise ConnectionError(f"a stranger at {peer} connected to the probe's socket")
        for end in self._ends:
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def take_side(self, side: int) -> None:
        self._socket = self._ends[side]
        self._ends[1 - side].close()

    def put(self, piece: memoryview) -> None:
        self._socket.sendall(piece)

    def take(self, into: memoryview) -> None:
        while into:
            got = self._socket.recv_into(into)
            if got == 0:
                raise EOFError("the other process closed the connection")
            into = into[got:]

    def give_turn(self, number: int, message: memoryview) -> None:
        _NUMBER.pack_into(message, 0, number)
        self._socket.sendall(message)

    def await_turn(self, message: memoryview) -> int:
        self.take(message)
        return int(_NUMBER.unpack_from(message)[0])

    def close(self) -> None:
        for end in self._ends:
            end.close()


def run(bench: ProbeBench) -> ProbeReport:
    """Measure it."""
    report = ProbeReport("network")
    part_s = bench.budget_s / _PARTS
    try:
        channel = Tcp()
    except OSError as error:
        report.skip("tcp", f"no TCP connection over 127.0.0.1 can be had: {error}")
    else:
        total_bytes = min(STREAM_BYTES, bench.memory_bytes // 16) // (1 << 20) * (1 << 20)
        with Pair.start("tcp", bench.cores, channel) as pair:
            method = f"TCP over 127.0.0.1, sendall and recv_into of {channel.chunk_bytes} bytes"
            pair.stream(bench, report, "tcp_stream", total_bytes=total_bytes, budget_s=part_s, method=method)
            for message_bytes in (8, 4096):
                pair.handover(
                    bench,
                    report,
                    "tcp_handover",
                    message_bytes=message_bytes,
                    budget_s=part_s / 2,
                    method="TCP over 127.0.0.1, TCP_NODELAY",
                )
    _measure_http(bench, report, part_s)
    return report


@dataclass(frozen=True)
class Service:
    """Where the service is asked."""

    is_secure: bool
    host: str
    port: int | None
    path: str

    @classmethod
    def at(cls, url: str) -> Service:
        """Raises ValueError for what is no http URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// URL")
        return cls(parts.scheme == "https", parts.hostname, parts.port, f"{parts.path.rstrip('/')}/healthz")

    def connect(self) -> http.client.HTTPConnection:
        """A connection, opened."""
        kind = http.client.HTTPSConnection if self.is_secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=_ANSWER_WITHIN_S)
        connection.connect()
        return connection


class Asker:
    """A process that asks the service for its health, over connections that it keeps."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._connections: list[http.client.HTTPConnection] = []

    def connect(self, connections: int) -> int:
        """Have so many connections; bytes of an answer's body."""
        while len(self._connections) < connections:
            self._connections.append(self._service.connect())
        self._connections[0].request("GET", self._service.path)
        return self._take(self._connections[0])

    def ask(self, count: int) -> dict[str, float]:
        """Ask `count` times over each connection, all of them before an answer is awaited: when it began, ended."""
        path, connections, take = self._service.path, self._connections, self._take
        begun_s = time.perf_counter()
        for _ in range(count):
            for connection in connections:
                connection.request("GET", path)
            for connection in connections:
                take(connection)
        return {"begun_s": begun_s, "ended_s": time.perf_counter()}

    @staticmethod
    def _take(connection: http.client.HTTPConnection) -> int:
        response = connection.getresponse()
        body = response.read()
        if response.status != 200 or json.loads(body).get("status") != "ok":
            raise RuntimeError(f"/healthz answered {response.status}: {body[:200]!r}")
        return len(body)


def _measure_http(bench: ProbeBench, report: ProbeReport, budget_s: float) -> None:
    if bench.service_url is None:
        report.skip("http", "this worker was not told where the service is: set TORCHSTONE_URL for it")
        return
    try:
        service = Service.at(bench.service_url)
        service.connect().close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        report.skip("http", f"the service at {bench.service_url} cannot be reached from here: {error}")
        return
    try:
        _ask_service(bench, report, service, budget_s)
    except ContestantFailed as failure:
        report.skip("http", f"the service at {bench.service_url} did not answer as it should: {failure.reason}")


def _ask_service(bench: ProbeBench, report: ProbeReport, service: Service, budget_s: float) -> None:
    bench.progress("network: http")
    crowd = min(len(bench.cores), _MOST_ASKERS)
    askers = [
        Contestant.start(f"http:{index}", lambda: Asker(service), (core,), 1)
        for index, core in enumerate(bench.cores[:crowd])
    ]
    answers = 0
    with closing(askers):
        for crew, connections in ((askers[:1], 1), (askers, _CONNECTIONS)):
            body_bytes = ask_all([(asker, ("connect", {"connections": connections})) for asker in crew])[0]

            def run(count: int, crew: list[Contestant] = crew, connections: int = connections) -> float:
                nonlocal answers
                answers += count * connections * len(crew)
                return span_s(ask_all([(asker, ("ask", {"count": count})) for asker in crew]))

            count, took = time_runs(run, run_s=_RUN_S, budget_s=budget_s)
            method = f"GET {service.path} with http.client over {{}} kept connections, body of {body_bytes} bytes"
            if crew is askers:
                requests = count * connections * crowd
                at = {"connections": connections * crowd, "processes": crowd}
                told_how = method.format(connections * crowd)
                report.rate("http_requests", took, count=requests, method=told_how, at=at)
            else:
                told_how = method.format(1).replace("connections", "connection")
                report.latency("http_latency", took, count=count, method=told_how)
    report.check("http_answers", True, "status 200, ok", f"{answers} answers, all as they should be")
