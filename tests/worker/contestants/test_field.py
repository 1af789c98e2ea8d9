"""Contestants together: one that fails costs the others nothing."""

from __future__ import annotations

import os
import signal

from tests.worker.fresh import call_fresh
from torchstone.results import Result
from worker.contestants.field import Field


class Adder:
    """The least that a contestant can be."""

    def add(self, a: int, b: int) -> int:
        return a + b


def ask_a_dead_one() -> tuple[list[str], list[str], object]:
    done, result = list[str](), Result()
    with Field((min(os.sched_getaffinity(0)),), 1, "baseline", result) as field:
        for name in ("baseline", "killed"):
            field.start(name, Adder)
        os.kill(field.contestants["killed"].pid, signal.SIGKILL)
        os.waitid(os.P_PID, field.contestants["killed"].pid, os.WEXITED | os.WNOWAIT)
        for work in ("while it fails", "after it failed"):
            assert field.attempt("killed", "add", lambda work=work: done.append(work), a=1, b=2) is None
        return done, [row.of for row in result.skipped], field.attempt("baseline", "add", a=1, b=2)


def test_what_was_to_be_done_beside_a_contestant_that_died_is_done_all_the_same() -> None:
    assert call_fresh(ask_a_dead_one) == (["while it fails", "after it failed"], ["killed"], 3)
