"""From what the ranks told to the rows of a Result: timings, comparisons, curves, figures.

    report(result, runs, single=runs[0])

Every statistic recomputes from samples.npz: `STRATEGY/epoch` (seconds of each whole epoch), `STRATEGY/step` (seconds of
each step on a full batch), `STRATEGY/marks` (steps, devices, 6: see `worker.parallel.clock`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchstone.ceilings import Ceilings
from torchstone.results import Check, Comparison, Curve, Figure, Result, Timing
from worker.measure import roofline, statistics
from worker.parallel import clock
from worker.parallel.setting import Course, Setting

Numbers = NDArray[np.float64]
_SENT = {
    "fsdp": "weights for forward and backward, and gradients",
    "tensor": "partial outputs and their gradients",
    "pipeline": "activations and their gradients",
    "parameter_server": "gradients, or updated weights",
}
"""What `bytes_per_step` counts; of the others it is gradients."""


@dataclass
class Epoch:
    """One epoch of a strategy, all ranks together."""

    number: int
    seconds: float = 0.0
    samples: int = 0
    steps: int = 0
    losses: list[list[tuple[float, int]]] = field(default_factory=list)
    """Per step, per device: the sum of the losses and the samples of its share."""
    marks: Numbers = field(default_factory=lambda: np.zeros((0, 1, 6)))
    right: int = 0
    eval_samples: int = 0
    eval_s: float = 0.0
    learning_rate: float = 0.0

    def add(self, told: list[dict[str, Any]]) -> None:
        """Take in what the ranks told of some of its steps (`Trainer.train_epoch`)."""
        steps = min(answer["steps"] for answer in told)
        self.seconds += max(answer["seconds"] for answer in told)
        self.samples += told[0]["samples"]
        self.losses += [numbers([s for answer in told for s in answer["shares"][step]]) for step in range(steps)]
        marks = np.concatenate([np.array(m).reshape(1, -1, 6) for answer in told for m in answer["marks"]])
        marks = marks.swapaxes(0, 1)
        self.marks = np.concatenate([self.marks, marks]) if self.steps else marks
        self.learning_rate = told[0]["learning_rate"]
        self.steps += steps


@dataclass
class Run:
    """Everything known of one strategy."""

    setting: Setting
    at: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    distances: list[Figure] = field(default_factory=list)
    start_s: float | None = None
    first_step_s: float | None = None
    is_compiled: bool = False
    """Whether the compiler has made anything of it."""
    bytes_per_step: int | None = None
    peak_bytes: list[int] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    under_way: Epoch | None = None
    """The epoch after those, some steps of which are done."""
    diverged: bool = False
    is_over: bool = False
    reached_s: float | None = None
    weights: Path | None = None
    """The trained weights, once it is over."""
    exported_accuracy: float | None = None

    @property
    def name(self) -> str:
        return self.setting.strategy

    @property
    def is_equal(self) -> bool:
        """Whether every check passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def course(self) -> Course:
        return Course(self.setting)

    @property
    def steps(self) -> int:
        """Taken so far."""
        return sum(epoch.steps for epoch in self.epochs) + (self.under_way.steps if self.under_way else 0)

    @property
    def epoch_s(self) -> Numbers:
        """Seconds of each whole epoch."""
        whole = self.course.steps_per_epoch
        return np.array([e.seconds for e in self.epochs if e.steps == whole and self.course.is_whole(e.number)])

    @property
    def step_s(self) -> Numbers:
        """Seconds of each step on a full batch (of any, where none was full), from its begin to its end."""
        return self._step_s(self.epochs)

    @property
    def noise_floor(self) -> float | None:
        """How far two halves of the same are apart: the median step of every other epoch against that of the rest.

        The rounds of the job take turns, so what disturbs the machine for a while disturbs both halves as it disturbs
        two strategies. None where either half has too few steps for its median to say anything.
        """
        even, odd = (self._step_s(self.epochs[half::2]) for half in (0, 1))
        if min(len(even), len(odd)) < statistics.FEWEST_ROUNDS:
            return None
        return abs(float(np.median(odd) / np.median(even)) - 1)

    def _step_s(self, epochs: list[Epoch]) -> Numbers:
        every, full = [], []
        for epoch in epochs:
            seconds = (epoch.marks[:, :, clock.END].max(1) - epoch.marks[:, :, clock.BEGIN].min(1)).tolist()
            every += seconds
            sizes = [sum(samples for _, samples in row) for row in epoch.losses]
            full += [s for s, size in zip(seconds, sizes, strict=True) if size == self.full_batch]
        return np.array(full or every)

    @property
    def full_batch(self) -> int:
        """Samples of a step that is not the last of its epoch."""
        return min(self.setting.batch_size, self.course.samples)

    @property
    def trained_s(self) -> list[float]:
        """Seconds of training up to the end of each epoch: evaluation and other strategies' turns apart."""
        return list(itertools.accumulate(epoch.seconds for epoch in self.epochs))

    def reduced(self, row: list[tuple[float, int]]) -> float:
        """The loss of one step as the spec reduces it."""
        total, samples = sum(loss for loss, _ in row), sum(n for _, n in row)
        return total / samples if self.setting.spec.loss_reduction == "mean" else total


def numbers(row: list[Any]) -> list[tuple[float, int]]:
    """Shares as the ranks told them: what crossed the pipe as null was no number."""
    return [(math.nan if loss is None else loss, samples) for loss, samples in row]


def report(result: Result, runs: list[Run], samples_file: Path) -> None:
    """Put everything into `result`, and the raw samples into `samples_file`."""
    single = next((run for run in runs if run.name == "single" and run.epochs), None)
    result.noise_floor = single.noise_floor if single is not None else None
    arrays: dict[str, Any] = {}
    for run in runs:
        key = run.setting.key
        result.checks += run.checks
        result.figures += run.distances
        _figures(result, run)
        if not run.epochs:
            continue
        arrays |= {f"{key}/epoch": run.epoch_s, f"{key}/step": run.step_s}
        arrays[f"{key}/marks"] = np.concatenate([epoch.marks for epoch in run.epochs])
        _timings(result, run)
        _curves(result, run)
        _split(result, run)
        if single is not None and run is not single:
            _against_single(result, run, single)
    np.savez(samples_file, **arrays)


def _timings(result: Result, run: Run) -> None:
    for name, seconds in (("epoch", run.epoch_s), ("step", run.step_s)):
        result.timings.append(
            Timing(
                name=name,
                of=run.name,
                at=run.at,
                **statistics.summarise(seconds),
                first_call_s=run.first_step_s if name == "step" else None,
                build_cold_s=run.first_step_s if name == "step" and run.is_compiled else None,
                samples=f"samples.npz#{run.setting.key}/{name}",
            )
        )


def _curves(result: Result, run: Run) -> None:
    per_epoch = run.course.steps_per_epoch  # max_steps may have cut the last one short: it stands at its share
    numbers, seconds = [e.number - 1 + e.steps / per_epoch for e in run.epochs], run.trained_s
    for name, y_name, y in (
        ("train_loss", "loss", [epoch_loss(run, epoch) for epoch in run.epochs]),
        ("test_accuracy", "accuracy", _accuracies(run)),
    ):
        for x_name, x in (("epoch", numbers), ("s", seconds)):
            curve = Curve(name=name, of=run.name, at=run.at, x_name=x_name, y_name=y_name, x=list(x), y=list(y))
            result.curves.append(curve)
    if run.setting.spec.record_steps:
        rows = [row for epoch in run.epochs for row in epoch.losses]
        steps: list[float | None] = [float(step) for step in range(1, len(rows) + 1)]
        losses: list[float | None] = [run.reduced(row) for row in rows]
        result.curves.append(
            Curve(name="step_loss", of=run.name, at=run.at, x_name="step", y_name="loss", x=steps, y=losses)
        )
        for rank in range(len(rows[0]) if rows else 0):
            if not any(row[rank][1] for row in rows):
                continue  # its losses are told by another rank
            y = [run.reduced([row[rank]]) if row[rank][1] else math.nan for row in rows]
            at = {**run.at, "rank": rank}
            result.curves.append(
                Curve(name="rank_loss", of=run.name, at=at, x_name="step", y_name="loss", x=steps, y=list(y))
            )


def epoch_loss(run: Run, epoch: Epoch) -> float:
    """The mean over an epoch's samples, however the steps' losses are reduced."""
    shares = [share for row in epoch.losses for share in row]
    samples = sum(n for _, n in shares)
    return sum(loss for loss, _ in shares) / samples if samples else math.nan


def _accuracies(run: Run) -> list[float]:
    return [e.right / e.eval_samples if e.eval_samples else math.nan for e in run.epochs]


def _figures(result: Result, run: Run) -> None:
    def tell(name: str, value: float | None, unit: str, at: dict[str, Any] | None = None, **more: Any) -> None:
        row = {"name": name, "of": run.name, "at": {**run.at, **(at or {})}, "value": value, "unit": unit, **more}
        result.figures.append(Figure.model_validate(row))

    spec, epochs = run.setting.spec, run.epochs
    tell("start_s", run.start_s, "s", reason=None if run.start_s is not None else "it did not start")
    tell("first_step_s", run.first_step_s, "s")
    tell(
        "learning_rate", run.setting.base_learning_rate, "1", lr_scaling=spec.lr_scaling, devices=run.setting.world_size
    )
    if run.bytes_per_step is not None:
        method = f"{_SENT.get(run.name, 'gradients')}, sent by the rank that sends most"
        tell("bytes_per_step", run.bytes_per_step, "B", method=method)
    for rank, peak_bytes in enumerate(run.peak_bytes):
        method = "resident, beyond what was there when the rank started" if run.setting.is_cpu else "device memory"
        tell("peak_bytes", peak_bytes, "B", {"rank": rank}, method=method)
    tell("diverged", float(run.diverged), "1")
    tell("samples_seen", sum(epoch.samples for epoch in epochs), "samples")
    tell("steps", sum(epoch.steps for epoch in epochs), "steps")
    if not epochs:
        return
    tell("eval_samples", epochs[-1].eval_samples, "samples")
    tell("evaluation_s", float(np.median([epoch.eval_s for epoch in epochs])), "s")
    tell("test_accuracy", _accuracies(run)[-1], "1")
    if run.exported_accuracy is not None:
        tell("exported_accuracy", run.exported_accuracy, "1")
    whole, steps = run.epoch_s, run.step_s
    per_epoch = run.course.steps_per_epoch
    if len(whole):
        tell("samples_per_s", _samples_per_epoch(run) / float(np.median(whole)), "samples/s", method="whole epochs")
    elif len(steps):
        tell("samples_per_s", run.full_batch / float(np.median(steps)), "samples/s", method="steps")
        tell("epoch_extrapolated_s", float(np.median(steps)) * per_epoch, "s", method=f"{per_epoch} x the median step")
    if spec.target_accuracy is not None:
        reason = None if run.reached_s is not None else f"{spec.target_accuracy:g} was not reached"
        tell("time_to_accuracy_s", run.reached_s, "s", accuracy=spec.target_accuracy, reason=reason)


def _samples_per_epoch(run: Run) -> int:
    return next(e.samples for e in run.epochs if e.steps == run.course.steps_per_epoch)


def _split(result: Result, run: Run) -> None:
    """Where a step's time went: means over the steps, so that they add up to the mean step."""
    names = {"input_s": "input", "compute_s": "compute", "communicate_s": "communication", "wait_s": "wait"}
    if run.name == "fsdp":
        reason = "torch gathers weights and reduces gradients within forward and backward"
        for name in names.values():
            row = Figure(name=f"step_{name}_s", of=run.name, at=run.at, value=None, unit="s", reason=reason)
            result.figures.append(row)
        return
    marks = np.concatenate([epoch.marks for epoch in run.epochs])
    parts = clock.split([marks[:, device] for device in range(marks.shape[1])])
    for part, name in names.items():
        for rank, seconds in enumerate(parts[part].mean(0)):
            at = {**run.at, "rank": rank}
            result.figures.append(Figure(name=f"step_{name}_s", of=run.name, at=at, value=float(seconds), unit="s"))


def _against_single(result: Result, run: Run, single: Run) -> None:
    reason = None if run.is_equal else "it was not proven to compute the same as one device"
    if not single.is_equal:
        reason = reason or "what it is compared with, `single`, was not proven right"
    weak = run.at.get("scaling") == "weak"
    if weak and run.full_batch < run.setting.batch_size:
        reason = reason or f"the data do not hold a batch of {run.setting.batch_size}: its step is a smaller one"
    delta = max(statistics.SMALLEST_DELTA, result.noise_floor or 0.0)
    for name, ours, theirs in (("epoch", run.epoch_s, single.epoch_s), ("step", run.step_s, single.step_s)):
        rounds = min(len(ours), len(theirs))
        if rounds == 0 or (weak and name == "epoch"):
            continue
        ratio = statistics.compare(ours[:rounds], theirs[:rounds], seed=run.setting.spec.seed)
        few = statistics.TOO_FEW if rounds < statistics.FEWEST_ROUNDS else None
        result.comparisons.append(
            Comparison(
                name=name,
                of=run.name,
                against="single",
                at=run.at,
                speedup=None if reason else ratio.ratio,
                ci95=None if reason else statistics.finite(ratio.interval),
                p10_speedup=None if reason else ratio.p10_ratio,
                noise_floor=result.noise_floor,
                verdict="withheld" if reason else statistics.verdict(ratio.interval, delta),
                reason=reason or few or statistics.hidden_by_noise(ratio.interval, result.noise_floor),
            )
        )
    devices = run.setting.world_size
    # Steps where there are too few whole epochs for an interval.
    by = "step" if weak or min(len(run.epoch_s), len(single.epoch_s)) < statistics.FEWEST_ROUNDS else "epoch"
    ours, theirs = (run.step_s, single.step_s) if by == "step" else (run.epoch_s, single.epoch_s)
    rounds = min(len(ours), len(theirs))
    ratio = statistics.compare(ours[:rounds], theirs[:rounds], seed=run.setting.spec.seed)
    ends = statistics.finite(ratio.interval)
    share = 1 if weak else devices
    reason = reason or (statistics.TOO_FEW if rounds < statistics.FEWEST_ROUNDS else None)
    reason = reason or ("it ran on one device: there is nothing to scale" if devices == 1 else None)
    result.figures.append(
        Figure.model_validate(
            {
                "name": "scaling_efficiency",
                "of": run.name,
                "at": {"scaling": "weak" if weak else "strong"},
                "value": None if reason else ratio.ratio / share,
                "unit": "1",
                "reason": reason,
                "ci95": None if reason or ends is None else [end / share for end in ends],
                "devices": devices,
                "method": f"T1/{'T' if weak else 'nT'}n of the median {by}",
            }
        )
    )


def roofline_of(run: Run, facts: dict[str, Any], ceilings: Ceilings) -> Figure:
    """How far a strategy's step is from what its devices can do; `facts`: the reference's, of the model."""
    spec, devices, steps = run.setting.spec, run.setting.devices, run.step_s
    return roofline.point(
        run.name,
        run.at,
        roofline.Work.told(facts["work"][str(run.full_batch)]),
        float(np.median(steps)) if len(steps) else None,
        ceilings,
        dtype=spec.dtype,
        device_type=devices[0].type,
        cores=sum(spec.threads or len(device.cores) for device in devices),
        devices=len(devices),
    )
