"""Equal, before fast: each strategy's first steps compared with the reference that it must equal, as rows of checks.

    proof = Proof(spec, folder, reference, facts)      # `reference`: a gang of one that holds a Reference
    proof.check(run, gang)                             # fills run.checks and run.distances

What a reference gave is kept in the folder for the next strategy that must equal it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchstone.results import Check, Figure
from torchstone.training import TrainSpec
from worker.parallel.equality import Found, Moved, check_rows, compare, distance
from worker.parallel.ranks import Gang
from worker.parallel.reference import How
from worker.parallel.report import Run, numbers
from worker.parallel.setting import Setting


class Proof:
    """The proofs of one job."""

    def __init__(self, spec: TrainSpec, folder: Path, reference: Gang, facts: dict[str, Any]) -> None:
        self.spec, self.folder, self.reference, self.facts = spec, folder, reference, facts
        self.steady: dict[tuple[int, int], tuple[int, float]] = {}
        self.kinks: dict[tuple[int, int, bool], Moved] = {}
        self.losses: dict[str, list[float]] = {}

    def check(self, run: Run, gang: Gang) -> None:
        """Prove the strategy's first steps equal to the reference's."""
        spec, setting = self.spec, run.setting
        steps, rounding = self.steadiness(run)
        turned = self.turned(run, steps)
        told = gang.ask("check", {"steps": steps})
        run.first_step_s = max(answer["first_step_s"] for answer in told)
        run.is_compiled = all(answer["compiled_graphs"] for answer in told)
        run.bytes_per_step = max(answer["bytes_per_step"] for answer in told)
        files = [Path(answer["file"]) for answer in told]
        rows = [[share for answer in told for share in answer["shares"][step]] for step in range(steps)]
        of = Found.read([run.reduced(numbers(row)) for row in rows], files)
        adaptive = spec.optimizer.name != "sgd"
        for how, decides, detail in self._references(setting):
            against = self._reference(run, steps, how)
            if rounding > 0:
                detail = f"{detail}; the last bits of the weights alone move a gradient by {rounding:.1e} of itself"
            if decides:
                found = compare(of, against, steps, spec.dtype, adaptive, rounding, turned)
                at = {**run.at, "steps": steps, "batch": "whole" if how == "whole" else "shares"}
                run.checks += check_rows("equal_to_single", run.name, "single", at, found, detail)
            else:
                value, reason = distance(of, against), "BatchNorm's statistics are of each share: see batch_norm"
                row = {"name": "distance_from_whole_batch", "of": run.name, "at": {**run.at, "steps": steps}}
                method = f"|difference of the weights| / |how far they moved|; {reason}"
                run.distances.append(Figure.model_validate({**row, "value": value, "unit": "1", "method": method}))
        run.checks.append(replicas_row(run, told[0]["spread"], steps))
        for file in files:
            file.unlink()

    def _references(self, setting: Setting) -> list[tuple[How, bool, str]]:
        """(which, whether it decides, in words) of the references that a strategy is compared with."""
        has_batch_norm, has_dropout = self.facts["has_batch_norm"], self.facts["has_dropout"]
        whole: tuple[How, bool, str] = ("whole", True, "one device, the whole batch at once, dropout off")
        rounds: tuple[How, bool, str] = ("rounds", True, "one device, what all compute at once in turn, dropout off")
        if setting.strategy == "single" and self.spec.gradient_accumulation == 1:
            return [("shards", True, "the plain model, uncompiled, with the plain optimiser")]
        if setting.strategy == "replicate" and has_batch_norm and setting.world_size > 1:
            told = "one device, what DataParallel gives each GPU in turn, dropout off; BatchNorm keeps the first one's"
            return [("chunks", True, told), ("whole", False, "")]
        if not setting.splits_batch:
            parts: tuple[How, bool, str] = (
                "parts",
                True,
                "one device, the same parts of the batch in turn, dropout off",
            )
            return [parts, ("whole", False, "")] if has_batch_norm and _parts(setting) > 1 else [whole]
        if has_batch_norm and self.spec.batch_norm == "synchronized" and setting.world_size > 1:
            return [whole] if self.spec.gradient_accumulation == 1 else [rounds]
        shards: tuple[How, bool, str] = (
            "shards",
            True,
            "one device, the same shares in turn, each with its own random stream and BatchNorm statistics",
        )
        if has_batch_norm:
            return [shards, ("whole", False, "")]
        return [shards] if has_dropout else [shards, whole]

    def steadiness(self, run: Run) -> tuple[int, float]:
        """The steps that are compared, no more than rounding lets a comparison judge; and what rounding does in them.

        Only BatchNorm amplifies it so that this matters in the first steps.
        """
        devices, batch_size = run.setting.world_size, run.setting.batch_size
        if (devices, batch_size) not in self.steady:
            steps, rounding = min(self.spec.check_steps, run.course.total_steps), 0.0
            if self.facts["has_batch_norm"]:
                arguments = {"steps": steps, "devices": devices, "batch_size": batch_size}
                ((steps, rounding),) = self.reference.ask("steadiness", arguments)
            self.steady[devices, batch_size] = (steps, rounding)
        return self.steady[devices, batch_size]

    def turned(self, run: Run, steps: int) -> Moved:
        """How far units at a kink move each tensor, where rounding decides on which side of it they are."""
        if self.facts["has_batch_norm"] or not self.facts["has_kinks"] or self.spec.dtype != "float32":
            return {}
        devices, batch_size = run.setting.world_size, run.setting.batch_size
        dropout = self.facts["has_dropout"] and not run.setting.checks_without_dropout
        key = (devices, batch_size, dropout)
        if key not in self.kinks:
            arguments = {"steps": steps, "devices": devices, "batch_size": batch_size, "dropout": dropout}
            (self.kinks[key],) = self.reference.ask("kinks", arguments)
        return self.kinks[key]

    def _reference(self, run: Run, steps: int, how: How) -> Found:
        """The reference's first steps for the same devices and batch."""
        devices, batch_size = run.setting.world_size, run.setting.batch_size
        dropout = how == "shards" and not run.setting.checks_without_dropout
        parts = _parts(run.setting)
        # Without dropout the layout does not matter, and the plain one is compared with.
        last = dropout and self.facts["has_dropout"] and run.setting.is_channels_last
        key = f"{how}-{parts}-{devices}-{batch_size}-{'with' if dropout else 'without'}-{'last' if last else 'first'}"
        file = self.folder / f"reference-{key}.npz"
        if key not in self.losses:
            arguments = {
                "file": str(file),
                "steps": steps,
                "how": how,
                "dropout": dropout,
                "parts": parts,
                "channels_last": last,
            }
            (losses,) = self.reference.ask("run", {**arguments, "devices": devices, "batch_size": batch_size})
            self.losses[key] = [run.reduced(numbers([row])) for row in losses]
        return Found.read(self.losses[key], [file])

    def close(self) -> None:
        """Remove what the reference wrote."""
        for file in self.folder.glob("reference-*.npz"):
            file.unlink()


def _parts(setting: Setting) -> int:
    """Into how many parts a strategy that does not share out the batch cuts it."""
    spec = setting.spec
    return spec.microbatches if setting.strategy == "pipeline" else spec.gradient_accumulation


def replicas_row(run: Run, told: dict[str, Any], steps: int) -> Check:
    """Whether every replica holds the same weights after so many steps; `told`: of its spread, by a rank."""
    spread: float | None = told["value"]
    if not told["held_twice"]:
        detail = "no weight is held twice" if run.setting.world_size > 1 else "there is one device"
        spread = 0.0
    elif spread is None:
        detail = "a weight is no number, or infinite, on one replica only"
    else:
        detail = "the largest difference between two replicas' weights"
    passed = spread is not None and spread <= 1e-6
    at = {**run.at, "steps": steps}
    return Check(
        name="replicas_equal",
        of=run.name,
        against=run.name,
        at=at,
        passed=passed,
        rtol=0,
        atol=1e-6,
        max_abs_error=spread,
        detail=detail,
    )
