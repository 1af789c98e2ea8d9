"""A job as one long tidy table, for spreadsheets and data frames: one row for every number.

    section,name,of,at.batch_size,field,value,unit
    timings,latency,eager,1,median,1.2e-05,s
    comparisons,latency,script,1,speedup,1.31,

    frame = pandas.read_csv(io.StringIO(csv(job)))
    frame.query("section == 'timings' and field == 'median'")

One column for every key of any row's point (`at`). A pair such as ci95 is two rows, `ci95_low` and `ci95_high`; a
curve is a row for every point, with its x among the `at` columns. Missing numbers are empty.
"""

from __future__ import annotations

import csv as csv_module
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]
_ROW_SECTIONS = ("timings", "comparisons", "checks", "figures", "spans")
_NAMING = ("name", "of", "at", "unit")
_JOB_FIELDS = ("id", "kind", "name", "state", "created_at", "started_at", "finished_at")


@dataclass(frozen=True)
class _Cell:
    section: str
    name: str
    of: str
    at: Mapping[str, Any]
    field: str
    value: Any
    unit: str = ""


def csv(job: Json) -> str:
    """The job and its result as CSV text with a header line; lines end in CR LF, as RFC 4180 has it."""
    cells = list(_cells(job))
    points = sorted({str(key) for cell in cells for key in cell.at})
    out = io.StringIO()
    writer = csv_module.writer(out)
    writer.writerow(["section", "name", "of", *(f"at.{key}" for key in points), "field", "value", "unit"])
    for cell in cells:
        at = [_value(cell.at.get(key)) for key in points]
        writer.writerow([cell.section, cell.name, cell.of, *at, cell.field, _value(cell.value), cell.unit])
    return out.getvalue()


def _cells(job: Json) -> Iterator[_Cell]:
    for field in _JOB_FIELDS:
        yield _Cell("job", "", "", {}, field, job.get(field))
    for key, value in (job.get("labels") or {}).items():
        yield _Cell("job", "", "", {}, f"label.{key}", value)
    if job.get("error"):
        yield from _flat("error", "", "", {}, job["error"])
    result = job.get("result") or {}
    for section in _ROW_SECTIONS:
        for row in result.get(section) or []:
            rest = {field: value for field, value in row.items() if field not in _NAMING}
            for cell in _flat(section, row.get("name", ""), row.get("of", ""), row.get("at") or {}, rest):
                yield cell if "unit" not in row or not _is_number(cell) else _with_unit(cell, row["unit"], section)
    for curve in result.get("curves") or []:
        intervals = curve.get("ci95") or [None] * len(curve["y"])
        for x, y, interval in zip(curve["x"], curve["y"], intervals, strict=True):
            at = {**(curve.get("at") or {}), curve["x_name"]: int(x) if x is not None and x == int(x) else x}
            fields = {curve["y_name"]: y} | ({"ci95": interval} if interval else {})
            yield from _flat("curves", curve["name"], curve["of"], at, fields)
    for table in result.get("tables") or []:
        for index, row in enumerate(table["rows"]):
            for column, value in zip(table["columns"], row, strict=False):
                yield _Cell("tables", table["name"], "", {"row": index}, column, value)
    for artifact in result.get("artifacts") or []:
        yield from _flat("artifacts", artifact["name"], "", {}, {k: v for k, v in artifact.items() if k != "name"})
    for skipped in result.get("skipped") or []:
        yield from _flat("skipped", "", skipped["of"], {}, {k: v for k, v in skipped.items() if k != "of"})
    quality = result.get("quality") or {}
    if quality:
        yield _Cell("quality", "", "", {}, "grade", quality.get("grade"))
    for code in quality.get("codes") or []:
        yield from _flat("quality", code["code"], "", {}, {k: v for k, v in code.items() if k != "code"})
    for index, host in enumerate((result.get("environment") or {}).get("hosts") or []):
        yield from _flat("environment", "", "", {"host": index}, host)


def _flat(section: str, name: str, of: str, at: Json, fields: Json, prefix: str = "") -> Iterator[_Cell]:
    """A cell for every field: nested objects by dotted names, pairs of numbers as low and high, other lists as JSON."""
    for key, value in fields.items():
        field = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(section, name, of, at, value, f"{field}.")
        elif key == "ci95" and isinstance(value, (list, tuple)) and len(value) == 2:
            yield _Cell(section, name, of, at, f"{field}_low", value[0])
            yield _Cell(section, name, of, at, f"{field}_high", value[1])
        else:
            yield _Cell(section, name, of, at, field, value)


def _is_number(cell: _Cell) -> bool:
    return isinstance(cell.value, (int, float)) and not isinstance(cell.value, bool)


def _with_unit(cell: _Cell, unit: str, section: str) -> _Cell:
    """Statistics of a timing, and a figure's value, are in the row's unit; other fields name their own."""
    plain = {"min", "median", "mean", "std", "iqr", "p05", "p10", "p90", "p95", "p99", "ci95_low", "ci95_high"}
    if cell.field not in (plain if section == "timings" else {"value"}):
        return cell
    return _Cell(cell.section, cell.name, cell.of, cell.at, cell.field, cell.value, unit)


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
