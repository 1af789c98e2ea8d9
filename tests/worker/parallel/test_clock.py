"""The split of a step's time: its parts add up to the step, and none is negative."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.parallel.clock import BEGIN, END, TALK, split

PARTS = ("input_s", "compute_s", "wait_s", "communicate_s")


def row(input_s: float, work_s: float, meet_s: float | None, update_s: float, talk_s: float = 0.0) -> list[float]:
    """One step of one rank that begins at 0: `meet_s` is when all have met, None where they do not."""
    ready = input_s + work_s
    synced = ready if meet_s is None else meet_s
    return [0.0, input_s, ready, synced, synced + update_s, talk_s]


def of(*rows: list[float]) -> dict[str, Any]:
    return {name: values[0].tolist() for name, values in split([np.array([row]) for row in rows]).items()}


def test_ranks_that_meet_wait_for_the_slowest_and_then_for_the_link() -> None:
    found = of(row(1, 2, meet_s=9, update_s=1), row(1, 6, meet_s=9, update_s=1))
    assert found == {
        "input_s": [1, 1],
        "compute_s": [3, 7],
        "wait_s": [4, 0],
        "communicate_s": [2, 2],
    }


def test_ranks_that_do_not_meet_wait_for_nobody_at_the_end() -> None:
    """Stages of a pipeline: the first is at work long after the last is done, and they talk on the way."""
    found = of(row(0, 9, meet_s=None, update_s=1, talk_s=2), row(0, 4, meet_s=None, update_s=1, talk_s=3))
    assert found == {"input_s": [0, 0], "compute_s": [8, 2], "wait_s": [0, 0], "communicate_s": [2, 3]}


def test_one_device_waits_for_nobody_and_talks_to_nobody() -> None:
    assert of(row(1, 2, meet_s=3.5, update_s=1)) == {
        "input_s": [1],
        "compute_s": [3.5],
        "wait_s": [0],
        "communicate_s": [0],
    }


SECONDS = st.floats(0, 10, allow_nan=False)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, st.booleans()), min_size=1, max_size=4))
def test_parts_add_up_to_the_step_and_none_is_negative(ranks: list[tuple[float, float, float, float, bool]]) -> None:
    rows = [
        row(input_s, work_s, input_s + work_s + later_s if meets else None, update_s, talk_s=work_s / 2)
        for input_s, work_s, later_s, update_s, meets in ranks
    ]
    parts = split([np.array([row]) for row in rows])
    for number, marks in enumerate(rows):
        mine = [float(parts[name][0, number]) for name in PARTS]
        assert min(mine) >= -1e-12
        assert sum(mine) == pytest.approx(marks[END] - marks[BEGIN], abs=1e-9)
        assert marks[TALK] <= mine[3] + 1e-12
