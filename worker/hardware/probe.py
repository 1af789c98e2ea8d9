"""What a probe is handed and what it answers with: the interface of every module in `worker.hardware.table`.

    # worker/hardware/memory.py
    def run(bench: ProbeBench) -> ProbeReport:
        report = ProbeReport("memory")
        took = bench.repeat(lambda: copy(a, b), budget_s=0.5)             # seconds of each repeat, warm-up apart
        report.rate("stream_triad", took, bytes=3 * a.nbytes, method="C, -O3", working_set_bytes=3 * a.nbytes,
                    at={"cores": 1})
        report.skip("nvlink", "no GPU")
        return report

A probe runs in a process forked for it, pinned to `bench.cores`, in which no tensor operation has run: it may fork
further processes (`worker.measure.contestant.Contestant`) as long as it has not run one itself. A probe that raises,
crashes or runs far over its time costs its own figures only. It removes every file that it made in `bench.folder`.

Every figure can be recomputed from what stands beside it: a rate is `bytes / seconds` (or `flop / seconds`, or `count /
seconds`), a latency `seconds / count`. `seconds` is the best repeat where a ceiling is asked for (as STREAM does),
else the median; `statistic` says which.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from torchstone.results import Check, Curve, Figure, Skipped, Table
from worker.bench import LeasedDevice
from worker.measure.statistics import median_interval

Statistic = Literal["best", "median"]
FEWEST_REPEATS = 3
MOST_REPEATS = 1000


@dataclass(frozen=True)
class Repeats:
    """Seconds of each timed repeat of one call."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def ci95(self) -> tuple[float, float] | None:
        """Of the median; None under 6 repeats."""
        return median_interval(np.array(self.seconds))

    def in_runs_of(self, count: int) -> Repeats:
        """Each `count` in succession as one: their sum. What is left over at the end is dropped."""
        whole = len(self.seconds) // count * count
        return Repeats(tuple(sum(self.seconds[first : first + count]) for first in range(0, whole, count)))

    def __getitem__(self, statistic: Statistic) -> float:
        return self.best if statistic == "best" else self.median


@dataclass(frozen=True)
class Reading:
    """One number that a probe found, with what it was computed from; becomes a Figure of the result."""

    name: str
    of: str
    value: float | None
    unit: str
    method: str
    """What was run and by what: "C, gcc -O3", "torch.mm", "numpy"."""
    at: dict[str, Any] = field(default_factory=dict)
    bytes: int | None = None
    """Moved in `seconds`: read plus written, unless `method` says otherwise."""
    flop: int | None = None
    count: int | None = None
    """Loads, calls, round trips in `seconds`."""
    seconds: float | None = None
    statistic: Statistic | None = None
    repeats: int | None = None
    median: float | None = None
    """The value at the median repeat, where `value` is that of the best."""
    ci95: tuple[float, float] | None = None
    """Of the median, in `unit`."""
    working_set_bytes: int | None = None
    reason: str | None = None
    """Why `value` is None."""
    samples: str | None = None
    """Where the seconds of every repeat lie: artifact#key."""

    def figure(self) -> Figure:
        """As a row of the result; what is not known is left out."""
        told = {key: value for key, value in asdict(self).items() if value is not None or key == "value"}
        return Figure.model_validate(told)


@dataclass
class ProbeReport:
    """Everything that one probe found."""

    probe: str
    readings: list[Reading] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds of every repeat, by the key in samples.npz."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What was found rather than measured (cache sizes, link widths, the compiler): goes into `environment`."""

    def rate(
        self,
        name: str,
        took: Repeats,
        *,
        method: str,
        bytes: int | None = None,
        flop: int | None = None,
        count: int | None = None,
        at: dict[str, Any] | None = None,
        working_set_bytes: int | None = None,
        statistic: Statistic = "best",
        unit: str | None = None,
    ) -> Reading:
        """Add `bytes`, `flop` or `count` (the first that is given) per second."""
        work = next(amount for amount in (bytes, flop, count) if amount is not None)
        seconds, ends = took[statistic], took.ci95
        reading = Reading(
            name=name,
            of=self.probe,
            value=work / seconds,
            unit=unit or ("B/s" if bytes is not None else "FLOP/s" if flop is not None else "1/s"),
            method=method,
            at=at or {},
            bytes=bytes,
            flop=flop,
            count=count,
            seconds=seconds,
            statistic=statistic,
            repeats=len(took.seconds),
            median=work / took.median,
            ci95=(work / ends[1], work / ends[0]) if ends else None,
            working_set_bytes=working_set_bytes,
            samples=self._keep(name, at, took),
        )
        self.readings.append(reading)
        return reading

    def latency(
        self,
        name: str,
        took: Repeats,
        *,
        count: int,
        method: str,
        bytes: int | None = None,
        at: dict[str, Any] | None = None,
        working_set_bytes: int | None = None,
        statistic: Statistic = "median",
    ) -> Reading:
        """Add seconds per load, call or round trip, of which a repeat makes `count`."""
        seconds, ends = took[statistic], took.ci95
        reading = Reading(
            name=name,
            of=self.probe,
            value=seconds / count,
            unit="s",
            method=method,
            at=at or {},
            bytes=bytes,
            count=count,
            seconds=seconds,
            statistic=statistic,
            repeats=len(took.seconds),
            median=took.median / count,
            ci95=(ends[0] / count, ends[1] / count) if ends else None,
            working_set_bytes=working_set_bytes,
            samples=self._keep(name, at, took),
        )
        self.readings.append(reading)
        return reading

    def _keep(self, name: str, at: dict[str, Any] | None, took: Repeats) -> str:
        key = "/".join([self.probe, name, *(f"{key}={value}" for key, value in (at or {}).items())])
        assert key not in self.samples, f"two figures called {key}"
        self.samples[key] = took.seconds
        return f"samples.npz#{key}"

    def missing(self, name: str, unit: str, reason: str, *, method: str = "", at: dict[str, Any] | None = None) -> None:
        """Add a figure that could not be had here, and why."""
        self.readings.append(Reading(name, self.probe, None, unit, method, at or {}, reason=reason))

    def curve(
        self, name: str, x_name: str, x: list[float], y_name: str, y: list[float], at: dict[str, Any] | None = None
    ) -> None:
        """Add y over x."""
        points = {"x_name": x_name, "y_name": y_name, "x": list[float | None](x), "y": list[float | None](y)}
        self.curves.append(Curve(name=name, of=self.probe, at=at or {}, **points))

    def check(self, name: str, passed: bool, against: str, detail: str | None = None, **fields: Any) -> None:
        """Add what was proven of the data that moved (`against`: what it was compared with)."""
        self.checks.append(Check(name=name, of=self.probe, against=against, passed=passed, detail=detail, **fields))

    def skip(self, part: str, reason: str) -> None:
        """Say that a part of this probe (or, with `part` its own name, all of it) was not run, and why."""
        of = self.probe if part == self.probe else f"{self.probe}.{part}"
        self.skipped.append(Skipped(of=of, reason=reason))


@dataclass(frozen=True)
class ProbeBench:
    """The surroundings of one probe."""

    cores: tuple[int, ...]
    """Usable cores of the job: of its devices, cut to the container's CPU quota."""
    devices: tuple[LeasedDevice, ...]
    """With their cores (`device.cores`); those of type "cuda" in the order of torch's own numbers."""
    folder: Path
    """A scratch folder in the worker's data folder: the storage that results are written to."""
    memory_bytes: int
    """What the job may take in all; stay under half of it."""
    budget_s: float
    """Seconds that this probe should be done in."""
    service_url: str | None = None
    """Where this machine's worker reaches the HTTP service; None where it was not told."""
    seed: int = 0
    progress: Callable[[str], None] = lambda message: None
    """Tell, in a few words, what is being measured."""

    @property
    def gpus(self) -> tuple[LeasedDevice, ...]:
        return tuple(device for device in self.devices if device.type == "cuda")

    def repeat(
        self,
        call: Callable[[], object],
        *,
        budget_s: float,
        at_least: int = FEWEST_REPEATS,
        at_most: int = MOST_REPEATS,
        warm_up: int = 1,
        synchronize: Callable[[], None] | None = None,
        before: Callable[[], object] | None = None,
    ) -> Repeats:
        """Time `call` again and again, for about `budget_s` with warm-up, at least `at_least` times.

        `synchronize` is called at both ends of the clock, `before` (emptying a cache, say) outside it.
        """
        wait = synchronize or _nothing
        prepare = before or _nothing
        clock, collecting = time.perf_counter, gc.isenabled()
        end_s = clock() + budget_s
        seconds: list[float] = []
        gc.disable()
        try:
            for number in range(-warm_up, at_most):
                prepare()
                wait()
                start_s = clock()
                call()
                wait()
                now_s = clock()
                if number >= 0:
                    seconds.append(now_s - start_s)
                if number + 1 >= at_least and now_s >= end_s:
                    break
        finally:
            if collecting:
                gc.enable()
        return Repeats(tuple(seconds))


def _nothing() -> None:
    """Where there is nothing to wait for or to prepare."""


class Probe(Protocol):
    """A module of `worker.hardware` that measures one part of the machine."""

    def run(self, bench: ProbeBench) -> ProbeReport:
        """Measure it. Raises nothing for an absent part: that is `report.skip`ped with a reason."""
        ...
