"""What a barrier costs: a step that reads its result, against the same step that does not.

A step is one product of a stream (see `worker.asynchrony.chain`), on CPU devices by one thread. `no_barrier` waits for
the device once, at the end of a whole block of steps; every other contestant does something after each step that the
chapter warns of:

- `synchronize`    waits for the device (on a CPU device this does nothing: there is nothing to wait for)
- `item`           reads one number, `x[0, 0].item()`
- `print`          prints the matrix, into a file that drops it
- `numpy`          hands it to numpy, `x.cpu().numpy()`: on a CPU device without copying anything
- `numpy_copy`     copies it to numpy

The cost is the difference of the medians, with its interval; what was read is checked at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchstone.asynchrony import Part
from torchstone.results import Check, Figure
from worker.asynchrony.chain import Chain, exactly
from worker.asynchrony.contest import Contest, Point
from worker.asynchrony.stage import Stage, duration, synchronizer
from worker.measure import statistics
from worker.measure.resting import Resting

PART = Part.barriers.value
BARRIERS = ("no_barrier", "synchronize", "item", "print", "numpy", "numpy_copy")
_SIZES = (32, 256)


def measure(stage: Stage) -> None:
    """Race all barriers at a size where a step is short and one where it is not; on GPUs at the spec's too."""
    wanted = {min(size, stage.spec.size) for size in (*_SIZES, *([stage.spec.size] if stage.on_cuda else []))}
    points = [Point(str(size), {"size": size}) for size in sorted(wanted)]
    sizes = [point.at["size"] for point in points]
    with Contest(stage, PART, "no_barrier", stage.budget_s(Part.barriers)) as contest:
        for barrier in BARRIERS:
            contest.start(barrier, lambda barrier=barrier: Reader(barrier, sizes, stage))  # type: ignore[misc]
        contest.check_modes()
        contest.race(points)
        wrong = _check_all(stage, contest, points) | contest.unfinished()
        contest.judge(wrong)
        _tell(stage, contest, points, wrong)


class Reader(Resting):
    """A stream at every size, with one kind of barrier after each step."""

    def __init__(self, barrier: str, sizes: list[int], stage: Stage) -> None:
        super().__init__(synchronizer(stage.device), torch.inference_mode)
        if not stage.on_cuda:
            torch.set_num_threads(1)  # a barrier costs the same, and no helper thread is to be waited for
        self.sink = open(os.devnull, "w")  # noqa: SIM115, PTH123 - as long as this process lives
        self.barrier = barrier
        self.read: dict[str, Any] = {}
        """What was read last, by size."""
        self.chains = {f"{PART}/{size}": Chain(size, stage.dtype, stage.device, stage.spec.seed) for size in sizes}
        self.calls = {key: self._step(key, chain) for key, chain in self.chains.items()}

    def facts(self) -> dict[str, Any]:
        """What must be equal for all contestants."""
        return {"threads": torch.get_num_threads(), "dtype": str(next(iter(self.chains.values())).x.dtype)}

    def check(self, key: str) -> dict[str, Any]:
        """Two more steps; whether the stream and what the barrier read of it are exactly right after each."""
        told = self._check_step(key)
        return self._check_step(key) if told["passed"] else told

    def _check_step(self, key: str) -> dict[str, Any]:
        chain = self.chains[key]
        with self.mode():
            self.calls[key]()
        self.synchronize()
        told = chain.check()
        if not told["passed"]:
            return told
        expected, read = chain.expected(), self.read.get(key)
        if self.barrier == "item":
            told = exactly(np.array([read], dtype=expected.dtype), expected[:1, 0])
        elif self.barrier in ("numpy", "numpy_copy"):
            told = exactly(np.asarray(read), expected)
        elif self.barrier == "print":
            told["passed"] = read == str(torch.from_numpy(expected.copy()).to(chain.x.device))
        return told

    def _step(self, key: str, chain: Chain) -> Callable[[], None]:
        """The timed call."""
        read, sink, device = self.read, self.sink, chain.x.device
        synchronize: Callable[[], None] = (
            (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else torch.cpu.synchronize
        )

        def no_barrier() -> None:
            chain.step()

        def synchronized() -> None:
            chain.step()
            synchronize()

        def item() -> None:
            chain.step()
            read[key] = chain.x[0, 0].item()

        def printed() -> None:
            chain.step()
            read[key] = str(chain.x)
            print(read[key], file=sink)

        def numpy() -> None:
            chain.step()
            read[key] = chain.x.cpu().numpy()

        def numpy_copy() -> None:
            chain.step()
            read[key] = np.array(chain.x.cpu().numpy())

        return dict(zip(BARRIERS, (no_barrier, synchronized, item, printed, numpy, numpy_copy), strict=True))[
            self.barrier
        ]


def _check_all(stage: Stage, contest: Contest, points: list[Point]) -> dict[str, dict[str, str]]:
    wrong: dict[str, dict[str, str]] = {}
    for name in contest.names:
        for point in points:
            told = contest.attempt(name, "check", key=contest.key(point))
            if told is None:
                break
            row = Check.model_validate({"name": "exact", "of": name, "against": "known", "at": point.at, **told})
            if name != contest.twin:
                stage.result.checks.append(row)
            if not row.passed:
                wrong.setdefault(name, {})[point.key] = "what it read is not the step's result"
    return wrong


def _tell(stage: Stage, contest: Contest, points: list[Point], wrong: dict[str, dict[str, str]]) -> None:
    """Figures `barrier`: seconds that each adds to a step; and a sentence for every size."""
    for point in points:
        record = contest.record(point)
        steps = record.seconds["no_barrier"]
        costs = []
        for name in BARRIERS[1:]:
            if name not in record.seconds or wrong.get(name, {}).get(point.key):
                continue
            against = statistics.compare(steps, record.seconds[name], seed=stage.spec.seed)
            cost_s, interval = against.saved, against.saved_interval
            ends = statistics.finite(interval)
            row = {"name": "barrier", "of": name, "at": point.at, "value": cost_s, "unit": "s"}
            stage.result.figures.append(
                Figure.model_validate({**row, "ci95": list(ends) if ends else None, "method": "difference of medians"})
            )
            if ends is None:
                costs.append(f"{name}: {statistics.TOO_FEW}")
            else:
                costs.append(f"{name} {duration(cost_s) if ends[0] > 0 else 'nothing that shows'}")
        step = duration(float(np.median(steps)))
        stage.find(PART, f"to a step of {step} (size {point.at['size']}) a barrier after each adds: {', '.join(costs)}")
    if not stage.on_cuda:
        stage.find(
            PART,
            "on a CPU device no barrier waits for anything, since each step is done when it returns: what they add is "
            "what they do themselves. On a GPU each of them also ends the overlap of front end and device",
        )
