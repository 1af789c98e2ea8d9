"""Checkpoints in the store: only the attempt that holds the job saves, and what it replaces is told."""

from __future__ import annotations

import pytest

from tests.torchstone.store_samples import claim, let_leases_end, reconcile, submit, up
from torchstone.jobs import State
from torchstone.store import Store, checkpoints, leases
from torchstone.store.checkpoints import Part

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


def save(store: Store, holder: leases.Holder, *parts: tuple[str, str, int]) -> list[str] | None:
    with store.write() as conn:
        return checkpoints.replace(conn, holder, parts)


def saved(store: Store, job_id: str) -> list[Part]:
    with store.read() as conn:
        return checkpoints.of(conn, job_id)


def test_parts_are_replaced_one_by_one_and_what_they_had_is_told(store: Store) -> None:
    [job_id] = submit(store)
    holder = claim(store, up(store)).holder
    assert save(store, holder, ("ddp", A, 1), ("single", B, 2)) == []
    assert save(store, holder, ("ddp", C, 3)) == [A]
    assert save(store, holder, ("ddp", C, 3)) == [], "the same bytes stay"
    assert saved(store, job_id) == [Part("ddp", 1, 3, C), Part("single", 1, 2, B)]


def test_an_attempt_that_lost_its_job_saves_nothing(store: Store) -> None:
    # Given an attempt that saved, and was then given up for lost; and another that runs now
    [job_id] = submit(store)
    stale = claim(store, up(store)).holder
    assert save(store, stale, ("ddp", A, 1)) == []
    with store.write() as conn:
        let_leases_end(conn, "a")
    assert reconcile(store) == [job_id]
    assert save(store, stale, ("ddp", B, 1)) is None, "the job is queued"
    current = claim(store, up(store, "b")).holder
    # When both save, then only the later one counts, and it replaces what the earlier one had saved
    assert save(store, stale, ("ddp", B, 1)) is None
    assert saved(store, job_id) == [Part("ddp", 1, 1, A)]
    assert save(store, current, ("ddp", C, 1)) == [A]
    assert saved(store, job_id) == [Part("ddp", 2, 1, C)]


@pytest.mark.parametrize("end", [State.succeeded, State.failed, State.canceled])
def test_what_ended_jobs_saved_is_not_needed(store: Store, end: State) -> None:
    submit(store, 2)
    host = up(store)
    over, running = claim(store, host).holder, claim(store, host).holder
    save(store, over, ("ddp", A, 1), ("single", B, 1))
    save(store, running, ("ddp", C, 1))
    with store.write() as conn:
        leases.finish(conn, over, end)
        found = checkpoints.not_needed(conn)
        assert sorted(found) == [(over.job_id, A), (over.job_id, B)]
        for job_id, sha256 in found:
            checkpoints.forget(conn, job_id, sha256)
    assert saved(store, over.job_id) == [] and len(saved(store, running.job_id)) == 1
