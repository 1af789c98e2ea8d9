"""The grade: what speaks against a measurement, and how much."""

from __future__ import annotations

import numpy as np
import pytest

from torchstone.results import Code
from worker.measure.quality import grade, load_codes, mode_codes, race_codes, thread_codes
from worker.measure.race import Plan, Record, split

QUIET = {"seconds": 1.0, "steal_share": 0.0, "our_share": 0.5, "other_share": 0.0, "throttles": 0}


def test_the_worst_code_decides() -> None:
    info, warning, error = (Code(code=s, severity=s) for s in ("info", "warning", "error"))
    assert grade([]).grade == "valid"
    assert grade([info]).grade == "valid"
    assert grade([info, warning]).grade == "suspect"
    assert grade([warning, error]).grade == "invalid"


@pytest.mark.parametrize(
    ("what", "value", "code"),
    [("steal_share", 0.1, "cpu_steal"), ("other_share", 0.3, "outside_load"), ("throttles", 2, "thermal_throttle")],
)
def test_what_the_machine_did_is_named(what: str, value: float, code: str) -> None:
    assert load_codes(QUIET, (None, None)) == []
    assert [c.code for c in load_codes(QUIET | {what: value}, (None, None))] == [code]


def test_a_change_of_clock_is_named() -> None:
    assert [c.code for c in load_codes(QUIET, (3000.0, 2400.0))] == ["frequency_change"]
    assert load_codes(QUIET, (3000.0, 2990.0)) == []


def test_a_contestant_in_another_mode_makes_the_result_invalid() -> None:
    modes = {"eager": {"threads": 2, "grad": False}, "script": {"threads": 1, "grad": False}}
    (code,) = mode_codes(modes, "eager")
    assert code.evidence["differ"] == {"threads": [1, 2]}
    assert grade([code]).grade == "invalid"
    assert mode_codes({"eager": modes["eager"], "script": modes["eager"]}, "eager") == []


def test_noise_over_the_asked_precision_and_too_few_rounds_are_named() -> None:
    record = Record(seconds={"eager": np.ones(10)}, flat={"eager": True}, stopped_by="budget")
    plan = Plan("eager", 0.01, 1.0)
    assert [c.code for c in race_codes(record, plan, {}, 0.05, 0.001)] == ["noise_floor", "too_few_rounds"]
    record.seconds["eager"] = np.ones(60)
    assert race_codes(record, plan, {}, 0.001, 0.001) == []


@pytest.mark.parametrize(("calls", "size"), [(1000, 33), (997, 30), (1, 5), (7, 100), (60, 1)])
def test_calls_are_split_exactly_and_evenly(calls: int, size: int) -> None:
    sizes = split(calls, size)
    assert sum(sizes) == calls
    assert max(sizes) - min(sizes) <= 1


def test_more_threads_than_cores_are_named() -> None:
    assert thread_codes(2, (0, 1)) == []
    (code,) = thread_codes(3, (0, 1))
    assert code.code == "oversubscribed" and code.severity == "warning"
    assert code.evidence == {"threads": 3, "cores": [0, 1]}
