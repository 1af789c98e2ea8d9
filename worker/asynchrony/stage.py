"""One `async` job under way: what its parts share, and where they put what they find.

    stage = Stage(spec, bench, Result())
    stage.find("dispatch", "on cpu:0 a call returns when its result is there")     # a sentence for people

This process never runs a tensor operation: it forks the contestants, passes the turn, and does arithmetic in numpy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from torchstone.asynchrony import AsyncSpec, Part
from torchstone.results import Code, Result, Table
from worker.bench import Bench
from worker.measure.environment import host_facts
from worker.measure.race import Plan, Record
from worker.measure.stopwatch import nothing_to_wait_for

_WEIGHTS = {Part.numpy_vs_torch: 0.42, Part.dispatch: 0.26, Part.barriers: 0.12, Part.graph: 0.20}
"""Shares of the budget, by how much there is to time."""


@dataclass
class Stage:
    """What the parts of one job share."""

    spec: AsyncSpec
    bench: Bench
    result: Result
    host: dict[str, Any] = field(default_factory=dict)
    races: dict[str, tuple[Record, Plan]] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    """Samples that no race took, by their name in samples.npz."""
    codes: list[Code] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    _found: list[list[str]] = field(default_factory=list)
    _done: int = 0

    def __post_init__(self) -> None:
        self.host |= {"name": self.bench.host, **host_facts(self.bench.cores), "seed": self.spec.seed, "during": {}}
        self.host["devices"] = [asdict(device) for device in self.bench.devices]
        self.result.environment = {"hosts": [self.host]}

    @property
    def on_cuda(self) -> bool:
        """Whether the leased devices are GPUs."""
        return self.bench.devices[0].type == "cuda"

    @property
    def device(self) -> torch.device:
        """Where the parts that need one device run: the first leased one."""
        return self.torch_device(0)

    @property
    def threads(self) -> int:
        """Intra-op threads of a contestant that has the whole lease."""
        return self.spec.threads or len(self.bench.cores)

    @property
    def dtype(self) -> torch.dtype:
        """The type of all numbers."""
        found: torch.dtype = getattr(torch, self.spec.dtype)
        return found

    def torch_device(self, index: int) -> torch.device:
        """The leased device with this number, as this job's processes see it."""
        return torch.device(f"cuda:{index}" if self.on_cuda else "cpu")

    def budget_s(self, part: Part) -> float:
        """The share of the job's budget that a part may take."""
        return self.spec.budget_s * _WEIGHTS[part] / sum(_WEIGHTS[p] for p in self.spec.parts)

    def find(self, part: str, sentence: str) -> None:
        """Tell people what was found, with its numbers."""
        print(f"  {part}: {sentence}", flush=True)
        self._found.append([part, sentence])

    def say(self, message: str) -> None:
        """What is being done now."""
        print(message, flush=True)
        self.bench.progress(self._done, len(self.spec.parts), "parts", None, message, begins=True)

    def part_done(self) -> None:
        """One more part has been measured."""
        self._done += 1
        self.bench.progress(self._done, len(self.spec.parts), "parts", None, "")

    def progress_of(self, message: str) -> Callable[[int, int | None, float], None]:
        """What a race calls after every round."""
        start_s = time.perf_counter()

        def tell(done: int, total: int | None, eta_s: float) -> None:
            rounds = f"{done} rounds" if total is None else f"{done} of {total} rounds"
            took_s = time.perf_counter() - start_s
            self.bench.progress(
                self._done, len(self.spec.parts), "parts", eta_s, f"{message}: {rounds} in {took_s:.1f} s"
            )

        return tell

    def findings(self) -> Table:
        """All sentences."""
        return Table(name="findings", columns=["part", "found"], rows=[list(row) for row in self._found])


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Waits for everything that was queued on `device`."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else nothing_to_wait_for


def share_hidden(share: float, ends: Sequence[float | None] | None) -> str:
    """For a sentence: "61 %"; no number where the interval reaches zero."""
    if share <= 0:
        return "nothing"
    known = ends is not None and ends[0] is not None and ends[0] > 0
    return f"{100 * share:.0f} %" if known else "nothing that shows"


def duration(seconds: float) -> str:
    """For a sentence: "13.2 ms"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
