"""A heat: all races of a job, and what the machine did meanwhile. A doubtful one is run once more where that is cheap.

    first = run_heat(budget_s)
    second = run_heat(left_s) if may_repeat(first, left_s) else None
    heat, code = choose(first, second)       # what is published, and the code that tells of the other

Which of two heats is published is decided by what speaks against them (errors, then warnings, then the noise floor),
never by what they say of a contestant: picking the nicer speed-up would be choosing one's noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchstone.results import Code
from worker.measure.race import Plan, Record

CURABLE = {
    "noise_floor",
    "cpu_steal",
    "outside_load",
    "thermal_throttle",
    "frequency_change",
    "warm_up_not_flat",
    "compiled_while_timing",
}
"""What may be better a second time; more rounds or another budget are the client's to ask for."""
SET_ASIDE = "set_aside"


@dataclass
class Heat:
    """One pass over all measuring points: races by point, and what the machine did."""

    races: dict[str, tuple[Record, Plan]]
    during: dict[str, Any]
    codes: list[Code] = field(default_factory=list)
    noise_floor: float | None = None

    @property
    def spent_s(self) -> float:
        """Seconds that its races took."""
        return sum(record.spent_s for record, _ in self.races.values())

    @property
    def doubts(self) -> tuple[int, int, float]:
        """How much speaks against it: errors, warnings, the noise floor."""
        severities = [code.severity for code in self.codes]
        return severities.count("error"), severities.count("warning"), self.noise_floor or 0.0


def may_repeat(heat: Heat, left_s: float) -> bool:
    """Whether something curable speaks against `heat`, and as long a heat fits into what is left of the budget."""
    curable = any(code.code in CURABLE and code.severity != "info" for code in heat.codes)
    return curable and heat.spent_s <= left_s


def choose(first: Heat, second: Heat | None) -> tuple[Heat, Heat | None, list[Code]]:
    """The heat to publish, the one set aside, and the code that tells of it."""
    if second is None:
        return first, None, []
    kept, other = (second, first) if second.doubts <= first.doubts else (first, second)
    evidence = {
        "published": "second" if kept is second else "first",
        "set_aside_codes": sorted({code.code for code in other.codes if code.severity != "info"}),
        "set_aside_noise_floor": other.noise_floor,
    }
    return kept, other, [Code(code="rerun", severity="info", evidence=evidence)]
