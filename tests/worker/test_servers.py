"""Forkservers: what a job finds imported, and that they do not get into each other's way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

from torchstone.specs import parse_spec
from worker import processes
from worker.servers import COMPILER, PLAIN, ForkServers, preload_for

MLP = {"kind": "jit", "model": {"preset": "mlp"}}


@pytest.mark.parametrize(
    ("spec", "preload"),
    [
        (MLP | {"variants": ["eager", "script", "trace_optimized"]}, PLAIN),
        (MLP | {"variants": ["eager", "compile"]}, COMPILER),
        (MLP | {"variants": ["eager", "export_aot"]}, COMPILER),
        ({"kind": "train", "dataset": {"name": "digits"}, "model": {"preset": "lenet"}}, COMPILER),
    ],
    ids=["torchscript", "compile", "export", "train"],
)
def test_only_who_needs_the_compiler_waits_for_its_import(spec: dict[str, object], preload: str) -> None:
    assert preload_for(parse_spec(spec)) == preload


@pytest.fixture
def servers() -> Iterator[ForkServers]:
    """Ended with the thread that started them, as in a worker."""
    servers = ForkServers()
    yield servers
    for pid in servers.pids:
        processes.end_group(pid, grace_s=0)


def tell(pipe: Connection) -> None:
    pipe.send((os.getppid(), [name for name in ("torch", "torch._dynamo", "celery") if name in sys.modules]))


def tell_secrets(pipe: Connection) -> None:
    pipe.send([name for name in os.environ if name.startswith(("TORCHSTONE_", "AWS_"))])


@pytest.mark.slow
def test_a_job_is_not_told_what_opens_the_database_and_the_bucket(
    servers: ForkServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSTONE_DATABASE_URL", "postgresql://user:secret@host/torchstone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    ours, theirs = Pipe(duplex=False)
    process = servers.start(PLAIN, tell_secrets, (theirs,), "asked")
    theirs.close()
    assert ours.recv() == []
    process.join()


@pytest.mark.slow
def test_a_process_finds_what_its_server_imported_and_nothing_of_the_program_that_asked(
    servers: ForkServers, tmp_path: Path
) -> None:
    def ask(preload: str) -> tuple[int, list[str]]:
        ours, theirs = Pipe(duplex=False)
        process = servers.start(preload, tell, (theirs,), "asked")
        theirs.close()
        told: tuple[int, list[str]] = ours.recv()
        process.join()
        assert process.exitcode == 0
        return told

    with ThreadPoolExecutor(1) as starter, socket.socket(socket.AF_UNIX) as deaf:
        for preload, modules in ((PLAIN, ["torch"]), (COMPILER, ["torch", "torch._dynamo"]), (PLAIN, ["torch"])):
            assert starter.submit(ask, preload).result() == (servers.pid(preload), modules)
        # One that no longer listens, and is about to be dead, is waited for and replaced
        dying = servers.pid(PLAIN)
        assert dying is not None
        deaf.bind(str(tmp_path / "deaf"))
        vars(servers._servers[PLAIN])["_forkserver_address"] = str(tmp_path / "deaf")
        asked = starter.submit(ask, PLAIN)
        os.kill(dying, signal.SIGKILL)
        assert asked.result() == (servers.pid(PLAIN), ["torch"])
        assert servers.pid(PLAIN) != dying
        # Others in this program start processes as ever
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=tell, args=(theirs,))
        process.start()
        assert ours.recv()[0] not in servers.pids
        process.join()
    assert len(servers.pids) == 2
