"""The overlap figure, and what a budget holds, on numbers made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from worker.concurrency.pace import Cost, Pace, fit, share_s
from worker.concurrency.report import overlap
from worker.measure.race import Record


def record(compute: float, copy: float, both: float, rounds: int = 30) -> Record:
    wobble = 1 + 0.001 * np.sin(np.arange(rounds))
    seconds = {"compute": compute, "copy": copy, "both": both}
    return Record(seconds={name: value * wobble for name, value in seconds.items()})


@pytest.mark.parametrize(
    ("compute", "copy", "both", "eta", "bound"),
    [
        (1.0, 0.5, 1.0, 1.0, "compute"),
        (0.5, 1.0, 1.0, 1.0, "copy"),
        (1.0, 0.5, 1.5, 0.0, "compute"),
        (1.0, 0.5, 1.25, 0.5, "compute"),
        (1.0, 0.5, 0.9, 1.0, "compute"),  # never over 1
        (0.466, 2.31, 1.69, 1.0, "copy"),  # the book's own figures: 1.09 s saved where 0.47 could be
        (1.0, 0.5, 1.75, -0.5, "compute"),  # they disturbed each other
    ],
)
def test_eta_is_the_share_of_the_shorter_that_was_hidden(
    compute: float, copy: float, both: float, eta: float, bound: str
) -> None:
    told = overlap(record(compute, copy, both), "compute", "copy", "both", seed=0)
    assert told["value"] == pytest.approx(eta, abs=1e-3)
    assert told["bound"] == bound and told["bound_s"] == pytest.approx(max(compute, copy), rel=1e-3)
    low, high = told["ci95"]
    assert low <= told["value"] <= high <= 1


def test_too_few_rounds_give_no_interval() -> None:
    assert overlap(record(1.0, 0.5, 1.0, rounds=5), "compute", "copy", "both", seed=0)["ci95"] is None


PACE = Pace(size=4000, product_s=1.6, copy_s=0.02, check_s=0.04)


def test_repeats_are_cut_before_sizes_and_both_are_said() -> None:
    cost = Cost(products=8, checks=6)
    enough = fit(PACE, 50, 1, cost, share_s=50 * 8 * 2 * 10, at={})
    assert (enough.size, enough.repeats, enough.codes) == (4000, 50, ())
    some = fit(PACE, 50, 1, cost, share_s=8 * 1.65 * 10 * 4, at={"part": "concurrency"})
    assert (some.size, some.repeats) == (4000, 4)
    [code] = some.codes
    assert code.code == "repeats_cut_short" and code.severity == "warning"
    assert (code.evidence["asked"], code.evidence["timed"]) == (50, 4)
    assert code.evidence["at"] == {"part": "concurrency"}
    little = fit(PACE, 50, 4, cost, share_s=20, at={})
    assert (little.size, little.repeats) == (1000, 9)
    assert [code.code for code in little.codes] == ["size_cut_short", "repeats_cut_short"]


def test_a_budget_of_nothing_is_one_repeat_of_a_small_size() -> None:
    found = fit(PACE, 50, 1, Cost(products=8), share_s=0.0, at={})
    assert 64 <= found.size < 128 and found.repeats == 1


def test_fewer_repeats_than_the_least_are_kept() -> None:
    found = fit(PACE, 2, 4, Cost(products=1), share_s=1e6, at={})
    assert (found.size, found.repeats, found.codes) == (4000, 2, ())


def test_shares_go_to_the_parts_that_are_left() -> None:
    assert share_s(90, "concurrency", ["concurrency", "overlap", "streams"]) == pytest.approx(40)
    assert share_s(50, "overlap", ["overlap", "streams"]) == pytest.approx(30)
    assert share_s(20, "streams", ["streams"]) == 20
    assert share_s(-1, "streams", ["streams"]) == 0
