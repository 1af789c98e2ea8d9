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
