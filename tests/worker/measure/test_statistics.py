"""The statistics: properties that hold for all samples, and rates over many draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from worker.measure import statistics
from worker.measure.statistics import ALPHA, LOOSEST_SAME, compare, looks, median_interval, summarise, verdict

seconds = st.floats(1e-7, 1e3)
samples = st.integers(1, 300).flatmap(lambda n: arrays(np.float64, n, elements=seconds))


@given(samples)
def test_a_summary_is_numpys_and_in_order(taken: np.ndarray) -> None:
    told = summarise(taken)
    assert told["n"] == len(taken)
    assert told["median"] == np.median(taken) or math.isclose(told["median"], np.median(taken), rel_tol=1e-12)
    assert told["min"] <= told["p05"] <= told["p10"] <= told["median"]
    assert told["iqr"] >= 0
    assert (told["std"] is None) == (len(taken) == 1)
    if told["ci95"]:
        assert told["ci95"][0] <= told["median"] <= told["ci95"][1]


@pytest.mark.parametrize(("percentile", "fewest"), [("p90", 64), ("p95", 130), ("p99", 662)])
def test_tails_need_samples(percentile: str, fewest: int) -> None:
    assert summarise(np.arange(1.0, fewest))[percentile] is None
    assert summarise(np.arange(1.0, fewest + 1))[percentile] is not None


def test_no_samples_have_no_statistics() -> None:
    assert summarise(np.empty(0)) == {"n": 0, "min": None, "median": None, "mean": None, "std": None, "iqr": None}


def test_outliers_are_flagged_and_stay() -> None:
    taken = np.concatenate([np.random.default_rng(0).normal(1, 0.01, 100), [5.0]])
    assert summarise(taken)["outliers"] == 1
    assert summarise(taken)["n"] == 101
    assert summarise(np.ones(50))["outliers"] == 0


def test_the_interval_of_a_median_covers_it() -> None:
    random, covered = np.random.default_rng(1), 0
    for _ in range(400):
        interval = median_interval(random.lognormal(0, 0.3, 60))
        assert interval is not None
        covered += interval[0] <= 1.0 <= interval[1]
    assert covered >= 0.93 * 400


@given(st.integers(2, 200), st.floats(0.1, 10), st.integers(0, 5))
def test_a_ratio_scales_with_its_samples(rounds: int, factor: float, seed: int) -> None:
    taken = np.random.default_rng(seed).lognormal(0, 0.1, (2, rounds))
    plain = compare(taken[0], taken[1], resamples=200)
    scaled = compare(taken[0], factor * taken[1], resamples=200)
    assert scaled.ratio == pytest.approx(factor * plain.ratio)
    assert scaled.interval == pytest.approx([factor * end for end in plain.interval])
    assert plain.interval[0] <= plain.interval[1]


@given(st.integers(2, 100), st.integers(0, 5))
def test_a_comparison_is_deterministic(rounds: int, seed: int) -> None:
    taken = np.random.default_rng(seed).lognormal(0, 0.1, (2, rounds))
    assert compare(taken[0], taken[1], seed=seed, resamples=100) == compare(
        taken[0], taken[1], seed=seed, resamples=100
    )


@given(st.integers(statistics.FEWEST_ROUNDS, 100))
def test_a_disturbance_shared_by_a_round_cancels(rounds: int) -> None:
    drift = np.random.default_rng(rounds).lognormal(0, 1.0, rounds)
    ratio = compare(drift, 1.25 * drift, resamples=200)
    assert ratio.interval == pytest.approx((1.25, 1.25))


def test_a_stricter_alpha_gives_a_wider_interval() -> None:
    taken = np.random.default_rng(2).lognormal(0, 0.1, (2, 100))
    widths = [compare(taken[0], taken[1], alpha=alpha).half_width for alpha in (0.05, 0.01, 0.001)]
    assert widths == sorted(widths)
    assert widths[0] < widths[2]


def test_one_round_decides_nothing() -> None:
    lonely = compare(np.array([1.0]), np.array([2.0]))
    assert lonely.ratio == 2.0
    assert verdict(lonely.interval, 0.01) == "inconclusive"


def test_autocorrelated_rounds_are_resampled_in_blocks() -> None:
    steps = np.random.default_rng(3).normal(0, 0.01, 200)
    walk, independent = np.exp(np.cumsum(steps)), np.exp(steps)
    assert statistics.block_length(walk) == math.ceil(200 ** (1 / 3))
    assert statistics.block_length(independent) == 1


@given(st.floats(0.01, 0.5), st.floats(0.5, 2), st.floats(0.5, 2))
def test_a_verdict_is_one_of_four_and_mirrors(delta: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    said = verdict((low, high), delta)
    assert (said == "faster") == (low > 1 + delta)
    assert (said == "slower") == (high < 1 - delta)
    if said == "same":
        assert 1 - delta <= low
        assert high <= 1 + delta
        assert delta <= LOOSEST_SAME


def test_nothing_is_the_same_as_a_baseline_that_is_not_the_same_as_itself() -> None:
    assert verdict((0.95, 1.05), delta=0.06) == "same"
    assert verdict((0.95, 1.05), delta=1.8) == "inconclusive"


@given(st.integers(1, 100_000))
def test_alpha_is_spent_over_the_looks_and_no_more(most: int) -> None:
    taken = list(looks(most))
    assert sum(alpha for _, alpha in taken) == pytest.approx(ALPHA)
    assert all(alpha > 0 for _, alpha in taken)
    assert [rounds for rounds, _ in taken[:-1]] == [30 * 2**i for i in range(len(taken) - 1)]
    assert taken[-1][0] == most


def test_identical_contestants_are_called_different_in_at_most_2_percent() -> None:
    random, cries = np.random.default_rng(4), 0
    for trial in range(300):
        taken = random.lognormal(0, 0.05, (3, 60)) * random.lognormal(0, 0.2, 60)
        floor = abs(compare(taken[2], taken[0], seed=trial, resamples=500).ratio - 1)
        interval = compare(taken[1], taken[0], seed=trial, resamples=500).interval
        cries += verdict(interval, max(0.01, floor)) in ("faster", "slower")
    assert cries <= 0.04 * 300


def test_a_five_percent_difference_is_found() -> None:
    random, found = np.random.default_rng(5), 0
    for trial in range(50):
        taken = random.lognormal(0, 0.03, (2, 120)) * random.lognormal(0, 0.1, 120)
        found += verdict(compare(1.05 * taken[1], taken[0], seed=trial).interval, 0.01) == "slower"
    assert found >= 48


def test_the_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert statistics.geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert statistics.geometric_mean([]) is None


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 6, 8])
def test_few_rounds_do_not_cry_different(rounds: int) -> None:
    """Three rounds of identical contestants lie on one side in one case of four."""
    random, cries = np.random.default_rng(rounds), 0
    for trial in range(300):
        taken = random.lognormal(0, 0.05, (3, rounds))
        floor = abs(compare(taken[2], taken[0]).ratio - 1)
        interval = compare(taken[1], taken[0], seed=trial, resamples=300).interval
        cries += verdict(interval, max(0.01, floor)) in ("faster", "slower")
    assert cries <= 0.02 * 300
