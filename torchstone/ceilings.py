"""A host's ceilings: the rates that its `hardware` reports found, which every later result is set against.

    ceilings = Ceilings(document)             # as GET /v1/hosts/NAME/ceilings shows it; None = no report
    peak = ceilings.find("FLOP/s", dtype="float32", device_type="cpu", cores=2)
    peak.value, peak.job, peak.grade          # or a Reason, where the report has no such figure

A probe counts as the newest `valid` report has it that ran it, so that a report on the storage alone does not make the
rest forgotten; where no report of it is valid, as the newest `suspect` one has it: what disturbed the machine lowers no
roof. A ceiling keeps the job that found it and that job's grade.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
RATES = ("B/s", "FLOP/s")
_FIELDS = ("name", "of", "at", "value", "unit", "method", "bytes", "flop", "seconds", "working_set_bytes")
_HOW = 'submit {"kind": "hardware"} to that host'
STREAM = {"stream_copy", "stream_scale", "stream_add", "stream_triad"}
"""Figures of the probe `memory`, the best of which is the memory's ceiling."""


@dataclass(frozen=True)
class Report:
    """A finished `hardware` job."""

    job_id: str
    finished_at: str | None
    result: Json

    @property
    def grade(self) -> str:
        return str(self.result["quality"]["grade"])


def document(host: str, newest_first: Iterable[Report]) -> Json | None:
    """The ceilings of `host` as they are served; None where no report is fit for it."""
    found: list[Json] = []
    seen: set[str] = set()
    fit = [report for report in newest_first if report.grade != "invalid"]
    fit.sort(key=lambda report: report.grade != "valid")
    for report in fit:
        rates = [row for row in report.result["figures"] if row["unit"] in RATES and row["value"] is not None]
        source = {"job": report.job_id, "finished_at": report.finished_at, "grade": report.grade}
        found += [{**{k: row[k] for k in _FIELDS if k in row}, **source} for row in rates if row["of"] not in seen]
        seen |= {row["of"] for row in rates}
    if not fit:
        return None
    return {
        "host": host,
        "job": fit[0].job_id,
        "finished_at": fit[0].finished_at,
        "grade": fit[0].grade,
        "ceilings": found,
    }


@dataclass(frozen=True)
class Ceiling:
    """One rate that a result can be set against."""

    value: float
    unit: str
    name: str
    job: str
    grade: str


@dataclass(frozen=True)
class Reason:
    """Why there is no ceiling."""

    text: str


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of the host that a job runs on."""

    document: Json | None

    def find(self, unit: str, *, dtype: str, device_type: str, cores: int, devices: int = 1) -> Ceiling | Reason:
        """The rate of so many `cores` (on "cpu") or `devices` (on "cuda"): GEMM in `dtype` for "FLOP/s", else memory's.

        Memory's is the best of STREAM's kernels, a GPU's its copy within its memory. Several GPUs count as so many of
        the slowest one.
        """
        if self.document is None:
            return Reason(f"this host has no hardware report: {_HOW}")
        if unit == "FLOP/s":
            of, names = "gemm", {"gemm"}
        elif device_type == "cuda":
            of, names = "device_device", {"device_copy"}
        else:
            of, names = "memory", STREAM
        rows = [
            row
            for row in self.document["ceilings"]
            if row["of"] == of
            and row["name"] in names
            and row["unit"] == unit
            and (unit != "FLOP/s" or (row["at"]["dtype"] == dtype and row["at"]["device_type"] == device_type))
        ]
        what = f"{of} figure" + (f" in {dtype}" if unit == "FLOP/s" else "") + f" for {device_type}"
        if not rows:
            return Reason(f"the hardware report of this host has no {what}: {_HOW}")
        if device_type == "cuda":
            slowest = min(rows, key=_value)
            return _ceiling(slowest, devices)
        # What fewer cores reached, more can: where these were disturbed, they are no lower roof.
        fitting = [row for row in rows if row["at"].get("cores", 0) <= cores]
        if not any(row["at"].get("cores") == cores for row in fitting):
            has = ", ".join(str(count) for count in sorted({row["at"].get("cores", 0) for row in rows}))
            return Reason(f"the hardware report of this host has no {what} with {cores} cores, but with {has}")
        return _ceiling(max(fitting, key=_value), 1)


def _value(row: Json) -> float:
    return float(row["value"])


def _ceiling(row: Json, times: int) -> Ceiling:
    return Ceiling(times * _value(row), row["unit"], row["name"], row["job"], row["grade"])
