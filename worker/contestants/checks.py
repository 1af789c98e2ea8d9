"""Is what a contestant computes right? Its outputs, in files, against eager's, float64's and its own.

checks = Checks(folder, "float32", grad=False)
checks.file("script", "1")                       # where the contestant writes its output for batch size 1
checks.timed("script", "1", at)                  # rows equal_to_eager and equal_to_float64
checks.probed("trace", failed={})                # rows generalises, two_calls_agree, row_alone_agrees
checks.wrong                                     # {"trace": {"1": "why"}}: these get no speed-up
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from torchstone.results import Check
from worker.measure.equality import TOLERANCES, TRAINING_TOLERANCE, Equality, compare_outputs

PROBES = ("repeated", "other_values", "negated", "batch_3", "row_alone", "shorter")
_PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
"""Looser than for what is timed: a frozen branch, size or length is far outside."""
_FROZE = {
    "other_values": "it froze what it did for the values that it was built with",
    "negated": "it froze what it did for the signs that it was built with",
    "batch_3": "it froze the batch size that it was built with",
    "shorter": "it froze the length that it was built with",
}


class Checks:
    """The outputs of one job's contestants, and what was found of them."""

    def __init__(self, folder: Path, dtype: str, grad: bool, keys: list[str]) -> None:
        self.folder, self.keys = folder, keys
        self.tolerance = max(TRAINING_TOLERANCE if grad else 0.0, TOLERANCES[dtype])
        self.probe_tolerance = _PROBE_TOLERANCES[dtype]
        self.rows: list[Check] = []
        self.wrong: dict[str, dict[str, str]] = {}
        # A batch of one is another computation in training mode: batch normalisation sees the whole batch.
        self.probes = [name for name in PROBES if not (grad and name == "row_alone")]

    def file(self, name: str, what: str) -> str:
        """Where the output of `name` for a batch size or a probe lies."""
        return str(self.folder / f"output-{name}-{what}.npz")

    def files(self, name: str, whats: list[str]) -> dict[str, str]:
        """The same for several."""
        return {what: self.file(name, what) for what in whats}

    def timed(self, name: str, key: str, at: dict[str, Any], show: bool = True) -> None:
        """Compare what is timed with eager and with float64; `show`: as rows of the result."""
        ours, eager, truth = (self._load(who, key) for who in (name, "reference", "float64"))
        against = {"float64": truth} if name == "eager" else {"eager": eager, "float64": truth}
        for what, theirs in against.items():
            equal = compare_outputs(ours, theirs, truth, self.tolerance, eager)
            if not equal.passed:
                self._withhold(name, [key], f"its output is not equal to {what}'s: {equal.detail}")
            if show:
                self._add(f"equal_to_{what}", name, what, at, equal)

    def probed(self, name: str, failed: dict[str, str], probes: list[str]) -> None:
        """Compare the outputs for `probes` with eager's, and a repeated call and a lone row with its own."""
        for probe in probes:
            at = {"inputs": probe}
            if probe in failed:
                equal = Equality(
                    False, 0.0, 0.0, None, None, None, False, 0, f"it fails where eager runs: {failed[probe]}"
                )
                self._add("generalises", name, "eager", at, equal)
                self.withhold_all(name, f"{_FROZE.get(probe, probe)} ({equal.detail})")
                continue
            ours = self._load(name, probe)
            if probe == "repeated":
                before = self._load(name, self.keys[0])
                eager, truth = (self._load(who, self.keys[0]) for who in ("reference", "float64"))
                equal = compare_outputs(ours, before, truth, self.probe_tolerance, eager)
                self._add("two_calls_agree", name, name, {}, equal)
                reason = "two calls on the same input disagree"
            elif probe == "row_alone":
                within, eager, truth = (
                    [output[:1] for output in self._load(who, "batch_3")] for who in (name, "reference", "float64")
                )
                alone, exact = self._load("reference", probe), self._load("float64", probe)
                if not compare_outputs(alone, eager, truth, self.probe_tolerance, eager).passed:
                    # The model itself looks at the whole batch: then the row alone must be what eager makes of it.
                    equal = compare_outputs(ours, alone, exact, self.probe_tolerance, alone)
                    self._add("generalises", name, "eager", at, equal)
                    reason = "of a row alone it makes something else than eager"
                else:
                    equal = compare_outputs(ours, within, truth, self.probe_tolerance, eager)
                    self._add("row_alone_agrees", name, name, {}, equal)
                    reason = "a row alone gives another output than within a batch"
            else:
                eager, truth = self._load("reference", probe), self._load("float64", probe)
                equal = compare_outputs(ours, eager, truth, self.probe_tolerance, eager)
                self._add("generalises", name, "eager", at, equal)
                reason = _FROZE[probe]
            if not equal.passed:
                self.withhold_all(name, f"{reason}: {equal.detail}")

    def loaded(self, name: str, key: str) -> Equality:
        """Compare what a clean process made of the exported file with eager's output."""
        ours, eager, truth = (self._load(who, key) for who in (f"{name}.loaded", "reference.eval", "float64.eval"))
        equal = compare_outputs(ours, eager, truth, self.tolerance, eager)
        self._add("loads_without_torchstone", name, "eager", {}, equal)
        if not equal.passed:
            self.withhold_all(name, f"its file, loaded elsewhere, computes something else: {equal.detail}")
        return equal

    def withhold_all(self, name: str, reason: str) -> None:
        """No speed-up at any point, for this reason."""
        self._withhold(name, self.keys, reason)

    def not_loaded(self, name: str, reason: str) -> None:
        """The exported file could not be loaded or run by a clean process."""
        equal = Equality(False, 0.0, 0.0, None, None, None, False, 0, reason)
        self._add("loads_without_torchstone", name, "eager", {}, equal)
        self.withhold_all(name, f"its file cannot be used elsewhere: {reason}")

    def _add(self, check: str, name: str, against: str, at: dict[str, Any], equal: Equality) -> None:
        self.rows.append(Check(name=check, of=name, against=against, at=at, **vars(equal)))
        where = "".join(f", {key} {value}" for key, value in at.items())
        print(f"  {name}: {check}{where}: {'yes' if equal.passed else 'NO'} (largest error {equal.max_abs_error})")

    def _withhold(self, name: str, keys: list[str], reason: str) -> None:
        for key in keys:
            self.wrong.setdefault(name, {}).setdefault(key, reason)

    def _load(self, name: str, what: str) -> list[Any]:
        with np.load(self.file(name, what)) as archive:
            return [archive[entry] for entry in archive.files]
