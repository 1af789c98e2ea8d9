"""What a race's rows say, from made-up samples."""

from __future__ import annotations

import numpy as np
import pytest

from worker.measure.race import Plan, Record
from worker.measure.rows import judge


@pytest.mark.parametrize(
    ("spread", "share", "verdict"), [(0.001, 0.5, "faster"), (0.5, 0.98, "inconclusive"), (0.001, 2.0, "slower")]
)
def test_only_what_is_faster_pays_its_build_back(spread: float, share: float, verdict: str) -> None:
    draw = np.random.default_rng(1)
    samples = {name: 1e-3 * (1 + spread * draw.random(40)) for name in ("eager", "eager_again", "script")}
    samples["script"] *= share
    record = Record(
        seconds=samples,
        first_call_s=dict.fromkeys(samples, 0.01),
        calls_per_sample=dict.fromkeys(samples, 1),
        flat=dict.fromkeys(samples, True),
    )
    builds = {name: {"build_s": 0.0} for name in samples} | {"script": {"build_s": 0.1, "build_warm_s": 0.05}}
    found = judge(record, Plan("eager", 0.01, 1.0), {}, "1", {}, builds)
    (row,) = [row for row in found.comparisons if row.of == "script"]
    assert row.verdict == verdict
    figures = {figure.name for figure in found.figures if figure.name.startswith("break_even")}
    assert figures == ({"break_even_calls_cold", "break_even_calls_warm"} if verdict == "faster" else set())
    assert (row.break_even_calls is not None) == (verdict == "faster")


@pytest.mark.parametrize(("apart", "told"), [(1.2, True), (1.0, False)])
def test_a_difference_that_only_the_noise_floor_hides_says_so(apart: float, told: bool) -> None:
    """A tenth is more than 1 %, and no more than what the baseline differs from itself by."""
    draw = np.random.default_rng(1)
    samples = {name: 1e-3 * (1 + 0.001 * draw.random(40)) for name in ("eager", "eager_again", "script")}
    samples["eager_again"] *= apart
    samples["script"] *= 0.9
    each = {"first_call_s": 0.01, "calls_per_sample": 1, "flat": True}
    record = Record(seconds=samples, **{key: dict.fromkeys(samples, value) for key, value in each.items()})
    found = judge(record, Plan("eager", 0.01, 1.0), {}, "1", {}, {name: {} for name in samples})
    rows = {row.of: row for row in found.comparisons}
    assert rows["script"].verdict == ("inconclusive" if told else "faster")
    assert ("the baseline differs from itself by" in (rows["script"].reason or "")) == told
    assert rows["eager_again"].reason is None
