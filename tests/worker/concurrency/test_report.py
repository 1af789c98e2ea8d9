"""Verdicts, the overlap figure, and what a budget holds, on numbers made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from torchstone.results import Result
from worker.concurrency.lanes import Lane, Piece, Sample
from worker.concurrency.pace import Cost, Pace, fit, share_s
from worker.concurrency.part import Checked, Part
from worker.concurrency.report import Judged, judge, known, overlap
from worker.measure.race import Plan, Record


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
    raw = (compute + copy - both) / min(compute, copy)
    assert told["raw"] == pytest.approx(raw, abs=1e-3)
    assert ("at most 1" in told["method"]) == (raw > 1.01)


def test_an_overlap_that_says_nothing_is_null_and_tells_what_was_seen() -> None:
    clear = overlap(record(1.0, 0.5, 1.0), "compute", "copy", "both", seed=0)
    assert known(clear) == clear
    random = np.random.default_rng(0)
    samples = {name: value * random.uniform(0.8, 1.2, 30) for name, value in (("c", 1.0), ("p", 0.02), ("b", 1.0))}
    drowned = overlap(Record(seconds=samples), "c", "p", "b", seed=0)
    low, high = drowned["raw_ci95"]
    assert high - low > 1
    for told, why in (
        (known(drowned), "is wider than 1"),
        (known(overlap(record(1.0, 0.5, 1.0, rounds=5), "compute", "copy", "both", seed=0)), "fewer than 6 rounds"),
        (known(clear, shared="cpu:0"), "share the cores of cpu:0"),
    ):
        assert told["value"] is None and told["ci95"] is None
        assert why in told["reason"] and f"the medians make {told['raw']:.4g}" in told["reason"]


def judged(seconds: dict[str, np.ndarray], cannot_win: dict[str, str] | None = None) -> tuple[Judged, Result]:
    """The part `concurrency` of two devices, from samples; `sequential_again` is as `sequential`."""
    seconds = {**seconds, "sequential_again": seconds["sequential"]}
    lanes = [
        Lane(name, lambda: Sample(1.0, []), "compute", name.partition("/")[0], {"devices": 2}, [Sample(1.25, [piece])])
        for name in seconds
        for piece in [Piece("compute", 0.0, 1.0, {"rank": 0})]
    ]
    pairs = [("concurrent", "sequential"), ("two_streams", "alone/0")]
    part = Part("concurrency", {}, lanes, "sequential", pairs, Checked(), cannot_win=cannot_win or {})
    result = Result()
    timed = Record(seconds=seconds, first_call_s=dict.fromkeys(seconds, 1.0), calls_per_sample={}, flat={})
    return judge(result, part, timed, Plan("sequential", 0.02, 100.0)), result


def verdicts(result: Result) -> dict[str, str]:
    return {c.of: c.verdict for c in result.comparisons}


def steady(value: float, rounds: int, spread: float = 0.001) -> np.ndarray:
    """`rounds` samples between value * (1 - spread) and value * (1 + spread), in an order without a trend."""
    steps = np.linspace(-spread, spread, rounds)
    return value * (1 + np.random.default_rng(7).permutation(steps))


@pytest.mark.parametrize(("sequential", "expected"), [(2.3, "faster"), (2.5, "inconclusive")])
def test_no_one_is_faster_than_a_hand_over(sequential: float, expected: str) -> None:
    samples = {"alone/0": 1.0, "alone/1": 1.0, "sequential": sequential, "concurrent": 1.6, "two_streams": 1.0}
    found, result = judged({name: steady(value, 40) for name, value in samples.items()})
    assert verdicts(result)["concurrent"] == expected
    codes = [code for code in found.codes if code.code == "handover_counts"]
    if expected == "faster":
        assert codes == []
        return
    [code] = codes
    assert code.severity == "warning"
    assert code.evidence["sequential_s"] == pytest.approx(2.5, rel=0.01)
    assert code.evidence["sum_of_alone_s"] == pytest.approx(2.0, rel=0.01)
    assert code.evidence["between_s"] == 0.25
    [row] = [c for c in result.comparisons if c.of == "concurrent"]
    assert row.reason is not None and "handover_counts" in row.reason and row.speedup is not None


@pytest.mark.parametrize("rounds", [8, 40])
def test_a_baseline_without_a_twin_is_no_better_known_than_its_own_median(rounds: int) -> None:
    rest = {name: steady(2.0, rounds) for name in ("alone/1", "sequential", "concurrent")}
    loose = {**rest, "alone/0": steady(1.0, rounds, 0.2), "two_streams": steady(0.97, rounds)}
    _, result = judged({**loose, "sequential": steady(3.0, rounds)})
    [row] = [c for c in result.comparisons if c.of == "two_streams"]
    assert row.verdict not in ("faster", "slower") and row.noise_floor is not None and row.noise_floor > 0.03
    clear = {**loose, "alone/0": steady(1.0, rounds, 0.005)}
    assert verdicts(judged({**clear, "sequential": steady(3.0, rounds)})[1])["two_streams"] == "faster"


def test_what_has_nothing_to_win_with_is_not_called_faster() -> None:
    samples = {"alone/0": 3.0, "alone/1": 3.0, "sequential": 6.0, "concurrent": 3.0, "two_streams": 1.0}
    seconds = {name: steady(value, 40) for name, value in samples.items()}
    assert verdicts(judged(seconds)[1])["two_streams"] == "faster"
    _, result = judged(seconds, {"two_streams": "one core"})
    [row] = [c for c in result.comparisons if c.of == "two_streams"]
    assert (row.verdict, row.reason) == ("inconclusive", "one core")
    seconds["two_streams"] = steady(4.0, 40)
    assert verdicts(judged(seconds, {"two_streams": "one core"})[1])["two_streams"] == "slower"


def test_few_rounds_of_a_twin_that_agrees_by_chance_are_not_a_noise_floor_of_nothing() -> None:
    names = ("alone/0", "alone/1", "two_streams")
    by_rounds = {}
    for rounds in (8, 40):
        samples = {name: steady(1.0, rounds) for name in names}
        samples |= {"sequential": steady(2.0, rounds, 0.2), "concurrent": steady(1.9, rounds)}
        [row] = [c for c in judged(samples)[1].comparisons if c.of == "concurrent"]
        by_rounds[rounds] = row
    assert by_rounds[40].noise_floor == 0
    assert by_rounds[8].noise_floor is not None and by_rounds[8].noise_floor > 0.1
    assert by_rounds[8].verdict == "inconclusive"


def test_spans_say_their_part() -> None:
    _, result = judged(
        {name: steady(1.0, 8) for name in ("alone/0", "alone/1", "sequential", "concurrent", "two_streams")}
    )
    assert result.spans and {span.at["part"] for span in result.spans} == {"concurrency"}
    assert {span.of for span in result.spans} == {"alone", "sequential", "concurrent", "two_streams"}


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
