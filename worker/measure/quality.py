"""How far a measurement can be believed: a grade, and codes with what was measured as evidence.

    grade([Code(code="noise_floor", severity="warning", evidence={...})]).grade     # "suspect"

`valid`: nothing speaks against it. `suspect`: a warning does. `invalid`: an error does; the figures are kept, and no
one should act on them. An `info` changes no grade.
"""

from __future__ import annotations

from typing import Any

from torchstone.results import Code, Quality
from worker.measure.race import Plan, Record
from worker.measure.statistics import FEWEST_ROUNDS, FIRST_LOOK

STEAL_SHARE = 0.02
OTHER_SHARE = 0.05
FREQUENCY_CHANGE = 0.05


def grade(codes: list[Code]) -> Quality:
    """The grade that `codes` amount to."""
    severities = {code.severity for code in codes}
    return Quality(
        grade="invalid" if "error" in severities else "suspect" if "warning" in severities else "valid", codes=codes
    )


def race_codes(
    record: Record, plan: Plan, at: dict[str, Any], noise_floor: float | None, worst: float | None
) -> list[Code]:
    """What one race tells against itself. `worst`: the widest comparison's half-width, relative."""
    codes = []
    if noise_floor is not None and noise_floor > plan.half_width:
        evidence = {"at": at, "noise_floor": noise_floor, "asked": plan.half_width}
        codes.append(Code(code="noise_floor", severity="warning", evidence=evidence))
    if record.rounds < FIRST_LOOK:
        evidence = {"at": at, "rounds": record.rounds, "wanted": FIRST_LOOK}
        codes.append(
            Code(
                code="too_few_rounds",
                severity="warning" if record.rounds >= FEWEST_ROUNDS else "error",
                evidence=evidence,
            )
        )
    if plan.calls is not None and record.stopped_by == "budget":
        evidence = {
            "at": at,
            "asked_calls": plan.calls,
            "timed_calls": int(record.calls[plan.baseline].sum()),
            "budget_s": plan.budget_s,
        }
        codes.append(Code(code="calls_cut_short", severity="warning", evidence=evidence))
    if plan.calls is None and worst is not None and worst > plan.half_width:
        evidence = {"at": at, "half_width": worst, "asked": plan.half_width, "stopped_by": record.stopped_by}
        codes.append(Code(code="precision_not_reached", severity="warning", evidence=evidence))
    if record.spent_s > 1.1 * plan.budget_s:
        evidence = {"at": at, "spent_s": record.spent_s, "budget_s": plan.budget_s}
        codes.append(Code(code="budget_exceeded", severity="info", evidence=evidence))
    restless = sorted(name for name, flat in record.flat.items() if not flat)
    if restless:
        codes.append(Code(code="warm_up_not_flat", severity="warning", evidence={"at": at, "contestants": restless}))
    return codes


def thread_codes(threads: int, cores: tuple[int, ...]) -> list[Code]:
    """More threads than cores: they wait for each other, and what is measured is the scheduler."""
    if threads <= len(cores):
        return []
    evidence = {"threads": threads, "cores": list(cores)}
    return [Code(code="oversubscribed", severity="warning", evidence=evidence)]


def load_codes(during: dict[str, Any], frequencies_mhz: tuple[float | None, float | None]) -> list[Code]:
    """What the machine did meanwhile: `during` is `Load.since`."""
    codes = []
    if during["steal_share"] > STEAL_SHARE:
        codes.append(Code(code="cpu_steal", severity="warning", evidence={"steal_share": during["steal_share"]}))
    if during["other_share"] > OTHER_SHARE:
        codes.append(Code(code="outside_load", severity="warning", evidence={"other_share": during["other_share"]}))
    if during["throttles"] > 0:
        codes.append(Code(code="thermal_throttle", severity="error", evidence={"throttles": during["throttles"]}))
    before, after = frequencies_mhz
    if before and after and abs(after / before - 1) > FREQUENCY_CHANGE:
        evidence = {"before_mhz": before, "after_mhz": after}
        codes.append(Code(code="frequency_change", severity="warning", evidence=evidence))
    return codes


def mode_codes(modes: dict[str, dict[str, Any]], baseline: str) -> list[Code]:
    """Contestants that do not run as the baseline does: other threads, flags, gradients. Their ratios mean nothing."""
    expected = modes[baseline]
    differ = {
        name: {
            key: [told.get(key), value]
            for key, value in expected.items()
            if key not in _FREE and told.get(key) != value
        }
        for name, told in modes.items()
    }
    return [
        Code(code="mode_mismatch", severity="error", evidence={"of": name, "against": baseline, "differ": found})
        for name, found in differ.items()
        if found
    ]


_FREE = {"nvml"}
"""Facts that may change between two looks: clocks, temperature, power."""
