"""When a lease that ran out means something, and when it does not: its holder had no chance to renew it."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
from sqlalchemy import select, update

from service.reconciler import Reconciler
from tests.torchstone.processes import wait_until
from tests.torchstone.store_samples import LEASE_S, claim, silent_holder, state, submit, up
from torchstone.settings import Settings
from torchstone.store import Store, leases
from torchstone.store.leases import Holder
from torchstone.store.schema import hosts, now_us, placements

HEARTBEAT_S = 0.2


@pytest.fixture
def reconciler(tmp_path: Path) -> Reconciler:
    return Reconciler(Settings(data=tmp_path, heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S))


@pytest.fixture
def silent(store: Store) -> Holder:
    """A job whose lease has run out."""
    return silent_holder(store)


def lost(store: Store, reconciler: Reconciler, asked_s: float | None = None) -> list[Holder]:
    with store.write() as conn:
        return reconciler.round(conn, monotonic() if asked_s is None else asked_s, 20)[0]


def test_a_process_that_just_started_waits_for_a_sign_of_life(store: Store, silent: Holder, tmp_path: Path) -> None:
    heartbeat_s = 10 * HEARTBEAT_S  # long beside one transaction, however slow the machine is just now
    begin_s = monotonic()
    reconciler = Reconciler(Settings(data=tmp_path, heartbeat_s=heartbeat_s))
    assert lost(store, reconciler) == []
    wait_until(lambda: lost(store, reconciler) == [silent], within_s=20)
    assert monotonic() - begin_s >= 2 * heartbeat_s


def test_whoever_held_up_the_reconciler_held_up_the_workers_too(
    store: Store, reconciler: Reconciler, silent: Holder
) -> None:
    wait_until(lambda: monotonic() > reconciler._spare_until_s, within_s=10)
    assert lost(store, reconciler, asked_s=monotonic() - 2 * HEARTBEAT_S) == []
    wait_until(lambda: lost(store, reconciler) == [silent], within_s=10)


def test_a_clock_that_jumped_is_no_silence(store: Store, reconciler: Reconciler, silent: Holder) -> None:
    wait_until(lambda: monotonic() > reconciler._spare_until_s, within_s=10)
    now_s = monotonic()
    with store.read() as conn:
        reconciler._seen = (now_s, leases.clock_us(conn) / 1e6 - 3600)  # it said an hour less a moment ago
    assert lost(store, reconciler) == []
    assert state(store, silent.job_id) == "running"
    wait_until(lambda: lost(store, reconciler) == [silent], within_s=10)


def test_a_clock_that_was_set_back_makes_no_lease_longer(store: Store, reconciler: Reconciler) -> None:
    submit(store)
    claim(store, up(store))
    hour_us = 3600 * 1_000_000
    with store.write() as conn:
        conn.execute(update(placements).values(lease_until_us=now_us() + hour_us))
        conn.execute(update(hosts).values(seen_us=now_us() + hour_us))
        reconciler._seen = (monotonic(), leases.clock_us(conn) / 1e6 + 3600)
    lost(store, reconciler)
    with store.read() as conn:
        now = leases.clock_us(conn)
        assert conn.execute(select(placements.c.lease_until_us)).scalar_one() <= now + LEASE_S * 1e6
        assert conn.execute(select(hosts.c.seen_us)).scalar_one() <= now
