"""Files on their way through a clean process: in order, beside other work or not, whatever one of them does to it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.worker.fresh import call_fresh
from worker.contestants.loads import Loads
from worker.measure.contestant import Contestant


class Loader:
    """Stands where CleanLoader does, and does what its `program` says."""

    def run(self, program: str) -> list[str]:
        if program == "die":
            os._exit(3)
        if program == "raise":
            raise ValueError("no model in here")
        return []


def load_all(programs: dict[str, str], at_once: bool) -> tuple[dict[str, Any], int]:
    started = list[Contestant]()

    def start() -> Contestant:
        started.append(Contestant.start("loader", Loader, (0,), 1))
        return started[-1]

    loads = Loads(start, at_once)
    for name, program in programs.items():
        loads.begin(name, program=program)
    reasons = loads.finish()
    for contestant in started:
        contestant.close()
    return reasons, len(started)


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
def test_a_file_that_takes_the_process_down_costs_the_others_nothing(at_once: bool) -> None:
    programs = {"a": "load", "b": "raise", "c": "die", "d": "load", "e": "die", "f": "load"}
    reasons, started = call_fresh(load_all, programs, at_once)
    assert list(reasons) == list(programs)
    assert [name for name, reason in reasons.items() if reason is None] == ["a", "d", "f"]
    assert reasons["b"] == "ValueError: no model in here"
    assert reasons["c"] == reasons["e"] == "its process ended with exit code 3"
    assert started == 3


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
def test_without_files_nothing_is_waited_for(at_once: bool) -> None:
    assert call_fresh(load_all, {}, at_once)[0] == {}
