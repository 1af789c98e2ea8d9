"""A doubtful heat is run once more where that is cheap; which of the two is published does not hang on speed-ups."""

from __future__ import annotations

from typing import Literal

from torchstone.results import Code
from worker.measure.heat import Heat, choose, may_repeat
from worker.measure.race import Plan, Record


def heat(*codes: tuple[str, Literal["info", "warning", "error"]], floor: float = 0.0, spent_s: float = 1.0) -> Heat:
    races = {"1": (Record(spent_s=spent_s), Plan("eager", 0.01, 10.0))}
    return Heat(races, {}, [Code(code=code, severity=severity) for code, severity in codes], floor)


def test_only_what_a_second_heat_may_cure_is_repeated_and_only_where_it_fits() -> None:
    assert may_repeat(heat(("outside_load", "warning")), left_s=1.0)
    assert not may_repeat(heat(("outside_load", "warning")), left_s=0.9)
    assert not may_repeat(heat(("too_few_rounds", "warning")), left_s=9.0)
    assert not may_repeat(heat(("noise_floor", "info")), left_s=9.0)
    assert not may_repeat(heat(), left_s=9.0)


def test_the_heat_with_less_against_it_is_published_and_the_other_is_told() -> None:
    noisy, quiet = heat(("outside_load", "warning"), floor=0.05), heat(floor=0.001)
    for first, second, which in ((noisy, quiet, "second"), (quiet, noisy, "first")):
        kept, other, [code] = choose(first, second)
        assert kept is quiet
        assert other is noisy
        assert code.severity == "info"
        assert code.evidence["published"] == which
        assert code.evidence["set_aside_codes"] == ["outside_load"]
    assert choose(noisy, None) == (noisy, None, [])
    mild, wild = heat(("cpu_steal", "warning"), floor=0.01), heat(("cpu_steal", "warning"), floor=0.2)
    assert choose(mild, wild)[0] is mild
