"""What every part is told, and what it hands back to be timed.

with Crew() as crew:
    part = devices.on_cpu(crew, plan)        # a Part: its lanes, its comparisons, what was checked
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchstone.errors import WorkloadError
from torchstone.parallel import ParallelSpec
from torchstone.results import Check
from worker.bench import LeasedDevice
from worker.concurrency.lanes import Lane
from worker.concurrency.products import TOLERANCE


@dataclass(frozen=True)
class Assigned:
    """What a part works with: the spec, and what the budget left of its numbers."""

    spec: ParallelSpec
    devices: tuple[LeasedDevice, ...]
    size: int
    repeats: int
    folder: Path
    """Of the job: processes that talk to one another meet there."""

    @property
    def is_cuda(self) -> bool:
        return self.devices[0].type == "cuda"

    def threads(self, rank: int = 0) -> int:
        """Intra-op threads of one CPU device."""
        return self.spec.threads or len(self.devices[rank].cores)

    @property
    def cores(self) -> tuple[int, ...]:
        """Of all devices."""
        return tuple(dict.fromkeys(core for device in self.devices for core in device.cores))


@dataclass
class Part:
    """One part, ready to be timed."""

    name: str
    at: dict[str, Any]
    """Tells its measuring point from others of the same part."""
    lanes: list[Lane]
    baseline: str
    pairs: list[tuple[str, str]]
    """(of, against): lanes that do the same work, whose times are compared."""
    checks: Checked
    notes: list[str] = field(default_factory=list)
    cannot_win: dict[str, str] = field(default_factory=dict)
    """Lanes that have nothing to be faster with, and why: seen to be so, it comes from elsewhere."""


@dataclass
class Checked:
    """What was compared so far: one row for each contestant."""

    rows: dict[tuple[str, str], Check] = field(default_factory=dict)

    def right(self, of: str, told: dict[str, Any], tolerance: float, against: str = "float64") -> None:
        """A first result against float64, before anything is timed."""
        error = told["max_abs_error"]
        passed = error is not None and error <= tolerance
        self._note("equal_to_float64", of, against, error, 1, tolerance, {}, passed)
        if not passed:
            raise WorkloadError(f"{of}: a product is off by {error} from float64; at most {tolerance} was expected")

    def runs(self, name: str, of: str, told: list[dict[str, Any]], dtype: str, at: dict[str, Any]) -> None:
        """Everything that one run made or copied. Raises WorkloadError where any of it is wrong."""
        for place, found in enumerate(told):
            error = found["max_abs_error"]  # null: NaN, which is what is read where nothing was written
            self._note(name, of, "expected", error, found["compared"], TOLERANCE[dtype], at, found["wrong"] is None)
            if found["wrong"] is not None:
                what = "copied" if name == "copied_whole" else "computed"
                differs = "parts of it were never written" if error is None else f"it is off by up to {error:.3g}"
                raise WorkloadError(
                    f"{of}: result {found['wrong'] + 1} of {found['compared']} ({found.get('where', place)}) was not "
                    f"whole when it was read: it was not {what} yet, or wrongly; {differs}"
                )

    def _note(
        self,
        name: str,
        of: str,
        against: str,
        error: float | None,
        compared: int,
        atol: float,
        at: dict[str, Any],
        passed: bool,
    ) -> None:
        key = (name, of + repr(at))
        new = Check(name=name, of=of, against=against, at=at, passed=True, atol=atol, rtol=0.0, max_abs_error=0.0)
        row = self.rows.setdefault(key, new)
        row.passed = row.passed and passed
        row.max_abs_error = None if error is None or row.max_abs_error is None else max(row.max_abs_error, error)
        before = int(row.detail.split()[0]) if row.detail else 0
        row.detail = f"{before + compared} compared"
