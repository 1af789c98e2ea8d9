"""What a `train` result tells against itself, or to whoever reads it: its codes, from what the strategies gave.

remarks(runs, noise_floor)      # worker.parallel.report.report must have been made
"""

from __future__ import annotations

import math
from typing import Any

from torchstone.results import Code
from worker.measure.quality import thread_codes
from worker.measure.statistics import FEWEST_ROUNDS, LOOSEST_SAME
from worker.parallel.equality import ONLY_ROUNDING
from worker.parallel.report import Run, epoch_loss

_BY_DATA = ("scratch", "replicate", "ddp", "fsdp", "parameter_server")
_WEAK = 0.05
"""Tolerance of a gradient: beyond it equality shows that nothing was forgotten, and no more."""
_GUESSING = 0.98
"""Of ln(classes): the loss of a model that gives every class the same chance."""


def remarks(runs: list[Run], devices: int, noise_floor: float | None) -> list[Code]:
    """The codes of a job's runs."""
    spec = runs[0].setting.spec
    codes = [_code("not_compiled", run) for run in runs if spec.compile and not run.is_compiled]
    cores = [device.cores for run in runs for device in run.setting.devices if device.type == "cpu"]
    codes += thread_codes(spec.threads or 1, min(cores, key=len)) if cores else []
    others = [run for run in runs if run.name != "single"]
    if devices == 1 and others:
        codes.append(Code(code="one_device", severity="info", evidence={"of": [run.name for run in others]}))
    if devices > 1 and others and len(others) == len(runs):
        codes.append(Code(code="no_baseline", severity="info", evidence={"of": [run.name for run in others]}))
    for run in others:
        if run.setting.strategy in _BY_DATA and run.setting.batch_size < devices:
            codes.append(_code("idle_devices", run, "warning", batch_size=run.setting.batch_size, devices=devices))
    if noise_floor is not None and noise_floor > LOOSEST_SAME:
        evidence = {"noise_floor": noise_floor, "asked": LOOSEST_SAME}
        codes.append(Code(code="noise_floor", severity="warning", evidence=evidence))
    for run in runs:
        codes += _too_few_rounds(run) + _weak_proof(run) + _not_learning(run)
    return codes


def _too_few_rounds(run: Run) -> list[Code]:
    rounds = len(run.step_s) if run.epochs else 0
    if not 0 < rounds < FEWEST_ROUNDS:
        return []
    return [_code("too_few_rounds", run, "warning", rounds=rounds, wanted=FEWEST_ROUNDS)]


def _weak_proof(run: Run) -> list[Code]:
    """Where rounding is amplified so far that only gross faults would be found, or fewer steps could be judged."""
    rows = [check for check in run.checks if check.name == "equal_to_single" and check.at["what"] == "gradient"]
    if not rows or run.setting.spec.dtype != "float32":
        return []
    widest, steps = max(check.rtol or 0.0 for check in rows), min(check.at["steps"] for check in rows)
    wanted = min(run.setting.spec.check_steps, run.course.total_steps)
    if widest < _WEAK and steps == wanted and not any(ONLY_ROUNDING in (check.detail or "") for check in rows):
        return []
    return [_code("weak_proof", run, gradient_rtol=widest, steps=steps, wanted=wanted)]


def _not_learning(run: Run) -> list[Code]:
    spec = run.setting.spec
    if not run.epochs or spec.dataset.classes < 2:
        return []
    loss, guessing = epoch_loss(run, run.epochs[-1]), math.log(spec.dataset.classes)
    if not _GUESSING < loss / guessing < 2 - _GUESSING:
        return []
    return [_code("not_learning", run, loss=loss, loss_of_guessing=guessing)]


def _code(code: str, run: Run, severity: Any = "info", **evidence: Any) -> Code:
    at = {"at": run.at} if run.at else {}
    return Code(code=code, severity=severity, evidence={"of": run.name, **at, **evidence})
