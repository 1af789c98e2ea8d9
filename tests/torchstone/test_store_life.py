"""Any sequence of what clients, workers and the reconciler can do keeps the store's promises, on both databases.

After each step: no two leases share a device of a machine, an exclusive one has its machine alone, a running or
canceling job has exactly one lease and every other job none, each state follows from the one before as
`torchstone.jobs.TRANSITIONS` says, and what has ended stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select, update

from tests.torchstone.store_samples import LEASE_S, a_host, spec
from torchstone.errors import Conflict
from torchstone.jobs import TERMINAL, TRANSITIONS, State
from torchstone.store import Store, claims, events, hosts, jobs, leases
from torchstone.store.schema import attempts, now_us, placements, results
from torchstone.store.schema import jobs as jobs_table

MAX_ATTEMPTS = 2
WORKERS = {"a": ("m", 2, 0), "b": ("m", 2, 0), "c": ("n", 1, 2)}  # name -> machine, CPU devices, CUDA devices


class Life(RuleBasedStateMachine):
    """The store under everybody's hands. `open` is set by the test: where to get a store from."""

    open: Callable[[], Store]

    def __init__(self) -> None:
        super().__init__()
        self.store = type(self).open()
        self.runs = dict.fromkeys(WORKERS, 0)
        self.holders: list[leases.Holder] = []  # every one that there ever was: stale ones write too
        self.before: dict[str, Any] = {}

    def teardown(self) -> None:
        self.store.dispose()

    def host(self, name: str) -> hosts.Host:
        machine, cpu, cuda = WORKERS[name]
        return a_host(name, machine=machine, cpu=cpu, cuda=cuda, run=str(self.runs[name]))

    worker = st.sampled_from(sorted(WORKERS))

    @rule(
        count=st.integers(1, 3),
        device_type=st.sampled_from(["cpu", "cuda", "auto"]),
        isolation=st.sampled_from(["device", "host", "auto"]),
        priority=st.sampled_from(["low", "normal", "high"]),
        start_within_s=st.sampled_from([None, None, 1e-6, 1000]),
        number=st.integers(1, 4),
    )
    def submit(self, number: int, **fields: Any) -> None:
        with self.store.write() as conn:
            jobs.insert_many(conn, [jobs.NewJob.of(spec(**fields)) for _ in range(number)])

    @initialize(isolations=st.lists(st.sampled_from(["device", "host"]), min_size=2, max_size=4))
    def start(self, isolations: list[str]) -> None:
        """Most of what can go wrong needs workers and work."""
        for name in WORKERS:
            self.start_worker(name)
        for isolation in isolations:
            self.submit(1, isolation=isolation)

    @rule(name=worker)
    def start_worker(self, name: str) -> None:
        self.runs[name] += 1
        with self.store.write() as conn:
            hosts.register(conn, self.host(name))
            run = str(self.runs[name])
            leases.take_back_from(conn, name, run, "restarted", max_attempts=MAX_ATTEMPTS)

    @rule(name=worker, times=st.integers(1, 3), lease_s=st.sampled_from([LEASE_S, -1]))
    def claim(self, name: str, times: int, lease_s: float) -> None:
        for _ in range(times):
            with self.store.write() as conn:
                claimed = claims.claim(conn, self.host(name), lease_s)
            if claimed is not None:
                self.holders.append(claimed.holder)

    @rule(name=worker, lease_s=st.sampled_from([LEASE_S, -1]), stale=st.booleans())
    def renew(self, name: str, lease_s: float, stale: bool) -> None:
        with self.store.write() as conn:
            leases.renew(conn, name, str(self.runs[name] - stale), lease_s)

    @rule(name=worker, state=st.sampled_from(["up", "up", "draining", "down"]))
    def set_state(self, name: str, state: str) -> None:
        with self.store.write() as conn:
            hosts.set_state(conn, name, str(self.runs[name]), state)

    @precondition(lambda self: self.holders)
    @rule(
        data=st.data(),
        end=st.sampled_from([State.succeeded, State.failed, State.canceled]),
        result=st.sampled_from([None, "{}"]),
    )
    def finish(self, data: st.DataObject, end: State, result: str | None) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        error = {"code": "c", "message": "m"} if end is State.failed else None
        files = [{"name": "f", "media_type": "m", "bytes": 0, "sha256": ""}]
        with self.store.write() as conn:
            leases.finish(conn, holder, end, result=result, error=error, files=files)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        with self.store.write() as conn:
            leases.progress(conn, data.draw(st.sampled_from(self.holders)), {"done": 1})

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), spent=st.booleans())
    def give_back(self, data: st.DataObject, spent: bool) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        with self.store.write() as conn:
            leases.give_back(conn, holder, "r", spent=spent, max_attempts=MAX_ATTEMPTS)

    @precondition(lambda self: self.before)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.before)))
        ended = self.before[job_id]["state"] in TERMINAL
        try:
            with self.store.write() as conn:
                jobs.cancel(conn, job_id)
            assert not ended
        except Conflict:
            assert ended

    @rule()
    def reconcile(self) -> None:
        with self.store.write() as conn:
            _, gangs = leases.reconcile(conn, max_attempts=MAX_ATTEMPTS, ring_again_s=0)
            waiting = select(jobs_table.c.device_type, jobs_table.c.device_count).where(jobs_table.c.state == "queued")
            assert set(gangs) == {tuple(row) for row in conn.execute(waiting)}
            overdue = placements.c.released_us.is_(None) & (placements.c.lease_until_us < now_us())
            assert conn.execute(select(placements).where(overdue)).all() == []

    @rule(name=worker)
    def a_machine_vanishes(self, name: str) -> None:
        with self.store.write() as conn:
            conn.execute(update(placements).where(placements.c.host == name).values(lease_until_us=0))

    @invariant()
    def leases_are_disjoint(self) -> None:
        with self.store.read() as conn:
            held = conn.execute(select(placements).where(placements.c.released_us.is_(None))).all()
            rows = {row.id: row for row in conn.execute(select(jobs_table))}
        used = [(p.machine, device) for p in held for device in orjson.loads(p.devices)]
        assert len(used) == len(set(used))
        for placed in held:
            if placed.exclusive:
                assert [p.job_id for p in held if p.machine == placed.machine] == [placed.job_id]
            machine, cpu, cuda = WORKERS[placed.host]
            assert placed.machine == machine
            owned = {f"cpu:{i}" for i in range(cpu)} | {f"cuda:{i}" for i in range(cuda)}
            assert set(orjson.loads(placed.devices)) <= owned
        of_running = sorted((row.id, row.attempt) for row in rows.values() if row.state in ("running", "canceling"))
        assert sorted((p.job_id, p.attempt) for p in held) == of_running

    @invariant()
    def states_follow(self) -> None:
        with self.store.read() as conn:
            now = {str(row["id"]): dict(row) for row in conn.execute(select(jobs_table)).mappings()}
            has_result = set(conn.scalars(select(results.c.job_id)))
            open_attempts = set(conn.scalars(select(attempts.c.job_id).where(attempts.c.finished_us.is_(None))))
            told = {job_id: events.after(conn, job_id, 0) for job_id in now}
        for job_id, job in now.items():
            was = self.before.get(job_id)
            if was is None:
                assert job["state"] == "queued"
            elif was["state"] in TERMINAL:
                assert job == was
            assert (job["finished_us"] is not None) == (job["state"] in TERMINAL)
            assert (job["error"] is not None) == (job["state"] in ("failed", "expired"))
            assert (job_id in open_attempts) == (job["state"] in ("running", "canceling"))
            assert job_id not in has_result or job["state"] in TERMINAL
            assert job["lost"] <= MAX_ATTEMPTS
            path = [State(orjson.loads(e["data"])["state"]) for e in told[job_id] if e["type"] == "state"]
            assert path[0] is State.queued
            assert path[-1] == job["state"]
            assert all(new in TRANSITIONS[old] for old, new in pairwise(path))
        self.before = now


@pytest.mark.slow
def test_any_life_of_jobs_keeps_the_promises(new_database: Callable[[], str], backend: str) -> None:
    url = new_database()

    def fresh() -> Store:
        store = Store(url)
        with store.write() as conn:
            for table in reversed(jobs_table.metadata.sorted_tables):
                conn.execute(table.delete())
        return store

    machine = type("LifeHere", (Life,), {"open": staticmethod(fresh)})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
