"""Many processes claim at once: every job once, no device twice, no error."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from multiprocessing.synchronize import Barrier

import orjson
import pytest
from sqlalchemy import select

from tests.torchstone.store_samples import LEASE_S, a_host, submit, up
from torchstone.jobs import State
from torchstone.store import Store, claims, leases
from torchstone.store.schema import attempts, jobs, placements

PROCESSES = 8
JOBS = 240
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.torchstone.store_samples"])  # the imports once, not eight times


def _run_jobs(url: str, name: str, machine: str, together: Barrier) -> None:
    """A worker of four devices: it claims what it may, ends the oldest, and goes home when nothing waits."""
    store = Store(url)
    host = a_host(name, cpu=4, machine=machine)
    running: list[leases.Holder] = []
    together.wait(60)
    while True:
        with store.write() as conn:
            claimed = claims.claim(conn, host, LEASE_S)
        if claimed is not None:
            running.append(claimed.holder)
        elif not running:
            break  # nothing waits, or a neighbour on this machine holds what it needs and will go on
        else:
            with store.write() as conn:
                assert leases.finish(conn, running.pop(0), State.succeeded, result="{}") is State.succeeded
    store.dispose()


@pytest.mark.slow
def test_eight_processes_claim_every_job_once(database_url: str, store: Store) -> None:
    # Given eight workers, two on each of four machines, and jobs of one and two devices, some exclusive
    workers = [(f"worker {i}", f"machine {i // 2}") for i in range(PROCESSES)]
    for name, machine in workers:
        up(store, name, cpu=4, machine=machine)
    for _ in range(JOBS // 8):
        submit(store, 5)
        submit(store, 2, count=2)
        submit(store, 1, isolation="host")
    # When they all start at once
    together = FORKSERVER.Barrier(PROCESSES)
    processes = [FORKSERVER.Process(target=_run_jobs, args=(database_url, *worker, together)) for worker in workers]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    # Then no process met an error, and every job ran once.
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    with store.read() as conn:
        assert Counter(conn.scalars(select(jobs.c.state))) == {"succeeded": JOBS}
        assert Counter(conn.scalars(select(attempts.c.number))) == {1: JOBS}
        placed = list(conn.execute(select(placements).join(jobs).order_by(jobs.c.started_us)))
    # Several took part (how evenly is the database's affair: SQLite's lock is not fair) ...
    assert len({p.machine for p in placed}) > 1
    # ... no device of a machine was held twice at one time, and an exclusive job had its machine alone.
    assert overlaps(placed) == []


def overlaps(placed: list) -> list:  # type: ignore[type-arg]
    """Pairs of placements that share a device, or a machine that one of them has alone, at one time.

    A lease starts `LEASE_S` before it would have ended. Both clocks tick in milliseconds on SQLite.
    """
    found = []
    for machine in {p.machine for p in placed}:
        held = [
            (p.lease_until_us - int(LEASE_S * 1e6), p.released_us, set(orjson.loads(p.devices)), p.exclusive, p.job_id)
            for p in placed
            if p.machine == machine
        ]
        for i, (start, end, devices, alone, job_id) in enumerate(held):
            for start2, end2, devices2, alone2, job_id2 in held[i + 1 :]:
                if start < end2 and start2 < end and (alone or alone2 or devices & devices2):
                    found.append((machine, job_id, job_id2))
    return found
