"""The statistics of timing samples, in numpy alone: summaries, ratio confidence intervals, verdicts, stopping.

    summarise(samples)["median"]                              # seconds, as the samples are
    compare(samples_a, samples_b).ratio                       # median(b) / median(a): over 1 = a is faster
    verdict((1.05, 1.09), delta=0.01)                         # "faster"

Samples of two contestants are paired: sample k of both was taken in round k, so what disturbed the round disturbed
both, and resampling whole rounds keeps that. Everything is deterministic for a given seed, so that each published
figure recomputes from the raw samples.

Sources: bootstrap percentile interval and moving blocks: Efron & Tibshirani 1993, Kunsch 1989; order-statistic
interval of a median: Conover 1999, 3.2; alpha spending: Lan & DeMets 1983.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float64]
Interval = tuple[float, float]
Verdict = Literal["faster", "slower", "same", "inconclusive", "withheld"]

ALPHA = 0.05
RESAMPLES = 2000
FEWEST_ROUNDS = 6
TOO_FEW = "too few rounds to tell"
"""What a sentence or a figure says instead of a ratio, where there were fewer."""
"""Under so few, all differences may lie on one side by chance (1 in 16 for five): no interval at 95 % is to be had."""
FIRST_LOOK = 30
SMALLEST_DELTA = 0.01
"""Differences below 1 % are never told."""
LOOSEST_SAME = 0.1
OUTLIER_MADS = 14.8
TAILS = {"p90": (90, 64), "p95": (95, 130), "p99": (99, 662)}
"""percentile -> (percent, fewest samples): with fewer, no sample is likely enough to lie beyond it."""
_Z = NormalDist()
_RESAMPLES_AT_ONCE = 2_000_000


def summarise(samples: Samples) -> dict[str, Any]:
    """What a Timing row tells of `samples`; the keys are that row's fields. Quantiles interpolate linearly."""
    n = len(samples)
    if n == 0:
        return {"n": 0, "min": None, "median": None, "mean": None, "std": None, "iqr": None}
    p05, p10, q1, median, q3 = (float(q) for q in np.percentile(samples, [5, 10, 25, 50, 75]))
    return {
        "n": n,
        "min": float(samples.min()),
        "median": median,
        "mean": float(samples.mean()),
        "std": float(samples.std(ddof=1)) if n > 1 else None,
        "iqr": q3 - q1,
        "p05": p05,
        "p10": p10,
        **{
            name: float(np.percentile(samples, percent)) if n >= fewest else None
            for name, (percent, fewest) in TAILS.items()
        },
        "ci95": median_interval(samples),
        "outliers": int(outliers(samples).sum()),
    }


def outliers(samples: Samples) -> NDArray[np.bool_]:
    """Which samples lie more than 14.8 median absolute deviations from the median. They are flagged, never dropped."""
    distance = np.abs(samples - np.median(samples))
    spread = float(np.median(distance))
    return distance > OUTLIER_MADS * spread if spread > 0 else np.zeros(len(samples), dtype=bool)


def median_interval(samples: Samples, alpha: float = ALPHA) -> Interval | None:
    """A distribution-free interval of the median between two order statistics; None under 6 samples."""
    n = len(samples)
    if n < FEWEST_ROUNDS:
        return None
    reach = _Z.inv_cdf(1 - alpha / 2) * math.sqrt(n) / 2
    low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
    ordered = np.sort(samples)
    return float(ordered[low]), float(ordered[high])


def autocorrelation(samples: Samples) -> float:
    """Lag-1 autocorrelation of the ranks (ranks, so that one outlier does not decide); 0 where it has no meaning."""
    if len(samples) < 8:
        return 0.0
    ranks = np.argsort(np.argsort(samples, kind="stable"), kind="stable").astype(np.float64)
    ranks -= ranks.mean()
    power = float((ranks * ranks).sum())
    return float((ranks[1:] * ranks[:-1]).sum()) / power if power > 0 else 0.0


def block_length(*contestants: Samples) -> int:
    """Rounds per bootstrap block: ceil(K^(1/3)) where any contestant's samples are autocorrelated, else 1."""
    rounds = len(contestants[0])
    limit = 1.96 / math.sqrt(max(rounds, 1))
    return math.ceil(rounds ** (1 / 3)) if any(autocorrelation(c) > limit for c in contestants) else 1


def resampled_medians(contestants: NDArray[np.float64], block: int, seed: int, resamples: int) -> NDArray[np.float64]:
    """Medians of resampled rounds: (contestants, rounds) -> (contestants, resamples); all share the rounds drawn."""
    rounds = contestants.shape[1]
    random = np.random.default_rng(seed)
    blocks = math.ceil(rounds / block)
    at_once = max(1, min(resamples, _RESAMPLES_AT_ONCE // rounds))
    medians = np.empty((contestants.shape[0], resamples))
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        first = random.integers(0, rounds, size=(count, blocks, 1))
        drawn = ((first + np.arange(block)) % rounds).reshape(count, -1)[:, :rounds]
        for row, samples in enumerate(contestants):
            medians[row, start : start + count] = _medians(samples[drawn])
    return medians


def _medians(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of each row; several times faster than np.median, which checks for NaN."""
    half = drawn.shape[1] // 2
    if drawn.shape[1] % 2:
        drawn.partition(half, axis=1)
        middle: NDArray[np.float64] = drawn[:, half]
        return middle
    drawn.partition((half - 1, half), axis=1)
    mean: NDArray[np.float64] = (drawn[:, half - 1] + drawn[:, half]) / 2
    return mean


@dataclass(frozen=True)
class Ratio:
    """median(against) / median(of) with its interval: over 1, `of` is the faster one."""

    ratio: float
    interval: Interval
    p10_ratio: float
    block: int
    saved: float
    """median(against) - median(of), in the samples' unit: what a call of `of` saves."""
    saved_interval: Interval
    """Its 95 % interval, by the same resamples."""

    @property
    def half_width(self) -> float:
        """Half the interval, relative to the ratio: the precision that was reached."""
        return (self.interval[1] - self.interval[0]) / (2 * self.ratio)


def compare(of: Samples, against: Samples, *, alpha: float = ALPHA, seed: int = 0, resamples: int = RESAMPLES) -> Ratio:
    """The paired block bootstrap of the ratio of medians, at confidence 1 - alpha.

    The 95 % percentile interval is taken and, for another alpha, stretched in the logarithm by z(alpha) / z(0.05):
    far quantiles of 2,000 resamples are too coarse to be read directly. Under 6 rounds the interval is infinite:
    that of three rounds would call identical contestants different in 8 % of runs.
    """
    ratio = float(np.median(against) / np.median(of))
    p10 = float(np.percentile(against, 10) / np.percentile(of, 10))
    saved = float(np.median(against) - np.median(of))
    if len(of) < FEWEST_ROUNDS:
        return Ratio(ratio, (0.0, math.inf), p10, 1, saved, (-math.inf, math.inf))
    block = block_length(of, against)
    medians = resampled_medians(np.stack([of, against]), block, seed, resamples)
    percents = [100 * ALPHA / 2, 100 * (1 - ALPHA / 2)]
    low, high = (float(q) for q in np.percentile(medians[1] / medians[0], percents))
    least, most = (float(q) for q in np.percentile(medians[1] - medians[0], percents))
    stretch = _Z.inv_cdf(1 - alpha / 2) / _Z.inv_cdf(1 - ALPHA / 2)
    interval = (ratio * (low / ratio) ** stretch, ratio * (high / ratio) ** stretch)
    return Ratio(ratio, interval, p10, block, saved, (least, most))


def finite(interval: Interval) -> Interval | None:
    """An interval that can be published: None where there were too few rounds for one."""
    return interval if math.isfinite(interval[0]) and math.isfinite(interval[1]) else None


def verdict(interval: Interval, delta: float) -> Verdict:
    """faster: wholly over 1 + delta; slower: wholly under 1 - delta; same: wholly inside; else inconclusive.

    Where the baseline differs from itself by more than a tenth, nothing is the same as it.
    """
    low, high = interval
    if low > 1 + delta:
        return "faster"
    if high < 1 - delta:
        return "slower"
    return "same" if delta <= LOOSEST_SAME and low >= 1 - delta and high <= 1 + delta else "inconclusive"


def hidden_by_noise(interval: Interval, noise_floor: float | None) -> str | None:
    """Why there is no verdict on a difference that there would be one on, did the baseline not differ from itself."""
    floor = noise_floor or 0.0
    if verdict(interval, SMALLEST_DELTA) not in ("faster", "slower") or verdict(interval, floor) != "inconclusive":
        return None
    return f"the baseline differs from itself by {100 * floor:.2g} %: this is not surely more than that"


def looks(most_rounds: int) -> Iterator[tuple[int, float]]:
    """(rounds, alpha) of each look at the data: 30, 60, 120, 240 ... up to `most_rounds`.

    Alpha is spent in proportion to the rounds seen (Lan & DeMets, linear): the shares of all looks sum to 0.05.
    """
    spent, rounds = 0.0, FIRST_LOOK
    while rounds < most_rounds:
        share = ALPHA * rounds / most_rounds
        yield rounds, share - spent
        spent, rounds = share, 2 * rounds
    yield max(most_rounds, 1), ALPHA - spent


def smallest_detectable_effect(delta: float, half_width: float) -> float:
    """The true difference (0.03 = 3 %) from which on an interval this wide lies outside 1 +- delta: half the time."""
    return delta + half_width


def geometric_mean(ratios: list[float]) -> float | None:
    """The mean speed-up of several cases; None of none."""
    return math.exp(sum(math.log(r) for r in ratios) / len(ratios)) if ratios else None
