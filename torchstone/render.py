"""A job as text that one would paste into a pull request, and as CSV: written once for every kind of experiment.

    print(text(job))            # the aligned table of GET /v1/jobs/ID/result.txt and of `torchstone get`
    csv(job)                    # the long tidy table of result.csv; see torchstone.tidy

Both take the job as it is on the wire, in any state, and rely on nothing but the one Result shape: they name no kind,
no contestant and no figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchstone.columns import aligned
from torchstone.heading import head
from torchstone.matching import agrees, is_about, is_of, point_in_words, point_keys, same_place, value_at
from torchstone.pieces import WITHIN, Notes, cell, indent, section
from torchstone.quantities import Scale, error, measure, number, quantity, scale, unit_of_axis
from torchstone.tidy import csv

__all__ = ["csv", "text"]

Json = Mapping[str, Any]
_MOST_SPANS = 12
_MOST_FIGURES = 200
_MOST_COLUMNS = 10
_ALIKE = 3
_BEST = "the value is the best repeat, the interval that of the median: it need not contain the value"


def text(job: Json) -> str:
    """The whole job as plain text, sections divided by empty lines; it ends with a newline."""
    result = job.get("result") or {}
    sections = [
        head(job, result),
        *_timings(result),
        _comparisons(result),
        _checks(result),
        _figures(result),
        _curves(result),
        _spans(job, result),
        *_tables(result),
        _skipped(result),
        _quality(result),
        _artifacts(result),
    ]
    return "\n\n".join("\n".join(map(_plain, section)) for section in sections if section) + "\n"


# -- timings with what belongs to them --------------------------------------------------------------------------


def _timings(result: Json) -> Iterator[list[str]]:
    """A table for every timing name; speed-ups and checks stand in the rows that they are about.

    Where timings tell their part (`at["part"]`), a name has a table in each part, and those of a part stand together,
    unless that would leave hardly a row to each: then the name has one table, at the end.
    """
    by_name: dict[tuple[str, str], list[Json]] = {}
    by_part: dict[tuple[str, str, str], list[Json]] = {}
    for row in result.get("timings") or []:
        kind = (row["name"], row.get("unit", "s"))
        by_name.setdefault(kind, []).append(row)
        by_part.setdefault((value_at(row, "part"), *kind), []).append(row)
    parts = {kind: len({value_at(row, "part") for row in rows}) for kind, rows in by_name.items()}
    whole = {kind for kind, rows in by_name.items() if parts[kind] > 1 and len(rows) < 2 * parts[kind]}
    for part in dict.fromkeys(part for part, *_ in by_part):
        for (own, name, unit), rows in by_part.items():
            if own == part and (name, unit) not in whole:
                yield _timing_table(f"{part}: {name}" if part else name, rows, result, unit, {"part"})
    for name, unit in by_name:
        if (name, unit) in whole:
            yield _timing_table(name, by_name[name, unit], result, unit, set())


def _timing_table(title: str, rows: Sequence[Json], result: Json, unit: str, in_title: set[str]) -> list[str]:
    points = [key for key in point_keys(rows) if key not in in_title]
    notes = Notes()
    common = scale([row.get("median") for row in rows], unit)
    blocks = any(row.get("calls_per_sample", 1) > 1 for row in rows)
    header = ["of", *points, "n x calls" if blocks else "n", f"median {common.unit}", "p10 .. p90", "iqr", "ci95"]
    header += ["build", "first call"]
    header += ["speed-up", "ci95", "verdict", "check"]
    body = []
    for row in rows:
        comparison = next((c for c in result.get("comparisons") or [] if is_of(c, row)), None)
        is_baseline = any(c["against"] == row["of"] and same_place(c, row) for c in result.get("comparisons") or [])
        body.append(
            [
                row["of"],
                *(value_at(row, key) for key in points),
                f"{row['n']} x {row.get('calls_per_sample', 1)}" if blocks else str(row["n"]),
                measure(row.get("median"), common),
                _span([row.get("p10"), row.get("p90")], common),
                measure(row.get("iqr") if row["n"] > 1 else None, common),
                _span(row.get("ci95"), common),
                quantity(row["build_cold_s"], "s") if row.get("build_cold_s") is not None else "",
                quantity(row.get("first_call_s"), "s"),
                *_speedup(comparison, is_baseline, notes),
                _check_of(row, result),
            ]
        )
    return section(title, header, body, most=len(body), notes=notes)


def _speedup(comparison: Json | None, is_baseline: bool, notes: Notes) -> list[str]:
    if comparison is None:
        return ["", "", "baseline" if is_baseline else ""]
    ratio = comparison.get("speedup")
    verdict = str(comparison["verdict"])
    if comparison.get("reason"):
        verdict = notes.mark(verdict, str(comparison["reason"]))
    low_high = comparison.get("ci95")
    interval = f"{low_high[0]:.3f} .. {low_high[1]:.3f}" if low_high and None not in low_high else "-"
    return [f"{ratio:.3f}x" if ratio is not None else "-", interval, verdict]


def _check_of(row: Json, result: Json) -> str:
    """What was proven of a timed contestant: at this very point or, where nothing was, wherever it agrees with it."""
    checks = result.get("checks") or []
    about = [check for check in checks if is_about(check, row)] or [check for check in checks if agrees(check, row)]
    if not about:
        return ""
    if not all(check["passed"] for check in about):
        return "FAILED"
    if all(check.get("bitwise") for check in about):
        return "equal bit by bit"
    worst = _worst(about, "max_abs_error")
    return "passed" if worst is None else f"passed, error {error(worst)}"


def _comparisons(result: Json) -> list[str]:
    """Those that stand in no row above: another pair's, or a second one for the same row."""
    timings = result.get("timings") or []
    rest, notes = [], Notes()
    seen: list[tuple[Any, ...]] = []
    for comparison in result.get("comparisons") or []:
        place = (comparison["name"], comparison["of"], comparison.get("at"))
        if place in seen or not any(is_of(comparison, row) for row in timings):
            rest.append([comparison["name"], comparison["of"], comparison["against"], point_in_words(comparison)])
            rest[-1] += _speedup(comparison, False, notes)
        seen.append(place)
    return section("comparisons", ["name", "of", "against", "at", "speed-up", "ci95", "verdict"], rest, notes=notes)


def _checks(result: Json) -> list[str]:
    """Those that failed, and those about no row above; of the passed ones one line for all points of a kind."""
    timings = result.get("timings") or []
    groups: dict[tuple[Any, ...], list[Json]] = {}
    for index, check in enumerate(result.get("checks") or []):
        if check["passed"] and any(is_about(check, row) for row in timings):
            continue
        own = None if check["passed"] else index
        kind = (check["name"], check["of"], check["against"], own, check.get("detail"), check.get("rtol"))
        groups.setdefault(kind, []).append(check)
    rows = [
        [
            *(str(word) for word in group[:3]),
            _points_of(checks),
            "passed" if checks[0]["passed"] else "FAILED",
            *_errors(max(checks, key=_share_of_atol)),
            str(_worst(checks, "nan_count") or ""),
            checks[0].get("detail") or "",
        ]
        for group, checks in groups.items()
    ]
    header = ["name", "of", "against", "at", "", "abs error", "rel error", "rtol / atol", "NaNs", "detail"]
    return section("checks", header, rows)


def _points_of(checks: Sequence[Json]) -> str:
    """Every value of every key of `at`, e.g. "steps=3, what=loss|gradient|weights"."""
    values: dict[str, dict[str, None]] = {}
    for check in checks:
        for key, value in (check.get("at") or {}).items():
            values.setdefault(key, {})[str(value)] = None
    return ", ".join(f"{key}={'|'.join(found)}" for key, found in values.items())


def _share_of_atol(check: Json) -> float:
    return (check.get("max_abs_error") or 0.0) / (check.get("atol") or 1e-300)


def _errors(check: Json) -> list[str]:
    """Absolute error, relative error (of the whole tensor where that is known), tolerances: all of one check."""
    whole = check.get("norm_rel_error")
    relative = check.get("max_rel_error") if whole is None else whole
    tolerances = f"{error(check.get('rtol'))} / {error(check.get('atol'))}"
    return [error(check.get("max_abs_error")), error(relative), tolerances]


def _worst(checks: Sequence[Json], field: str) -> float | None:
    return max((check[field] for check in checks if check.get(field) is not None), default=None)


# -- the other sections -----------------------------------------------------------------------------------------


def _figures(result: Json) -> list[str]:
    """A row for every name and point, a column for every contestant; a row for every figure where those are many."""
    figures = result.get("figures") or []
    columns = list(dict.fromkeys(row["of"] for row in figures))
    found: dict[tuple[str, str], dict[str, Json]] = {}
    for row in figures:
        found.setdefault((row["name"], point_in_words(row)), {})[row["of"]] = row
    filled = sum(map(len, found.values()))
    if len(columns) > _MOST_COLUMNS or filled < len(figures) or 3 * filled < len(columns) * len(found):
        return _one_by_one(figures)
    names = list(dict.fromkeys(row["name"] for row in figures))
    rows, below = [], Notes()
    for (name, point), by_column in sorted(found.items(), key=lambda cell: names.index(cell[0][0])):
        reasons: dict[str, list[str]] = {}
        for of, row in by_column.items():
            if told := row.get("reason") or row.get("note"):
                reasons.setdefault(told, []).append(of)
        notes = [f"{', '.join(of)}: {reason}" if len(of) < len(columns) else reason for reason, of in reasons.items()]
        rows.append(
            [name, point, *(_figure(by_column.get(column)) for column in columns), below.cell("; ".join(notes))]
        )
        intervals = [_interval(by_column.get(column)) for column in columns]
        if any(intervals):
            best = any(row.get("statistic") == "best" for row in by_column.values())
            rows.append(["  95 % interval", "", *intervals, below.cell(_BEST) if best else ""])
    return section("figures", ["name", "at", *columns, "note"], rows, most=_MOST_FIGURES, notes=below)


def _one_by_one(figures: Sequence[Json]) -> list[str]:
    """A row a figure, with what it was computed from; columns that nothing fills are left out by `aligned`.

    Those of one name that are null for one reason are one row.
    """
    header = ["name", "of", "at", "value", "value is", "95 % interval", "bytes", "FLOP", "count", "seconds", "note"]
    rows, notes = [], Notes()
    unknown: dict[tuple[str, str], list[Json]] = {}
    for row in figures:
        if row.get("value") is None and row.get("reason"):
            unknown.setdefault((row["name"], row["reason"]), []).append(row)
    for row in figures:
        alike = unknown.get((row["name"], row.get("reason") or ""), [row])
        if len(alike) >= _ALIKE:
            if row is alike[0]:
                of = f"{row['of']} and {len(alike) - 1} more"
                rows.append([row["name"], of, *[""] * 8, notes.cell(row["reason"])])
            continue
        rows.append([row["name"], row["of"], point_in_words(row), _figure(row)])
        rows[-1] += [_statistic(row, notes), _interval(row)]
        rows[-1] += [f"{row[key]:,}" if row.get(key) is not None else "" for key in ("bytes", "flop", "count")]
        rows[-1] += [quantity(row["seconds"], "s") if row.get("seconds") is not None else ""]
        rows[-1] += [notes.cell(row.get("reason") or row.get("note") or row.get("method") or "")]
    return section("figures", header, rows, most=_MOST_FIGURES, notes=notes)


def _figure(row: Json | None) -> str:
    return "" if row is None else quantity(row.get("value"), row["unit"])


def _statistic(row: Json, notes: Notes) -> str:
    """Which of its repeats a figure is, where it tells."""
    statistic = str(row.get("statistic") or "")
    return f"{statistic} {notes.cell(_BEST)}" if statistic == "best" and _interval(row) else statistic


def _interval(row: Json | None) -> str:
    """The figure's own `ci95`, in the figure's unit."""
    ends = (row or {}).get("ci95")
    if row is None or not ends or None in ends:
        return ""
    unit = scale([row.get("value")], row["unit"])
    return " .. ".join(number(end * unit.factor) for end in ends)


def _curves(result: Json) -> list[str]:
    rows = []
    for curve in result.get("curves") or []:
        y = curve["y"]
        unit = unit_of_axis(curve["y_name"])
        ends = [quantity(y[0], unit), quantity(y[-1], unit)] if y else ["", ""]
        rows.append([curve["name"], curve["of"], point_in_words(curve), f"{len(y)} by {curve['x_name']}", *ends])
    return section("curves", ["name", "of", "at", "points", "first", "last"], rows)


def _spans(job: Json, result: Json) -> list[str]:
    """A row for each kind of span: from the first one's start to the last one's end, and how much of that is work."""
    groups: dict[tuple[str, str, str], list[Json]] = {}
    for span in result.get("spans") or []:
        groups.setdefault((span["name"], span["of"], point_in_words(span)), []).append(span)
    busy = {kind: sum(span["end_s"] - span["start_s"] for span in spans) for kind, spans in groups.items()}
    unit = scale(busy.values(), "s")
    rows = [
        [
            *kind,
            str(len(spans)),
            measure(min(span["start_s"] for span in spans), unit),
            measure(max(span["end_s"] for span in spans), unit),
            measure(busy[kind], unit),
        ]
        for kind, spans in groups.items()
    ]
    header = ["name", "of", "at", "n", f"first start {unit.unit}", f"last end {unit.unit}", f"busy {unit.unit}"]
    rest = f"see result.csv, and as pictures /v1/jobs/{job['id']}/charts"
    return section("spans", header, rows, most=_MOST_SPANS, rest=rest)


def _tables(result: Json) -> Iterator[list[str]]:
    for table in result.get("tables") or []:
        rows = [[cell(value) for value in row] for row in table["rows"]]
        yield section(table["name"], list(table["columns"]), rows)


def _skipped(result: Json) -> list[str]:
    rows = [[row["of"], row.get("status", "skipped"), row["reason"]] for row in result.get("skipped") or []]
    return ["not measured", *indent(aligned([], rows, most=WITHIN))] if rows else []


def _quality(result: Json) -> list[str]:
    quality = result.get("quality")
    if not quality:
        return []
    floor = result.get("noise_floor")
    grade = f"quality: {quality['grade']}" + (f", noise floor {100 * floor:.2f} %" if floor is not None else "")
    rows = [[code["code"], code["severity"], _evidence(code.get("evidence") or {})] for code in quality["codes"]]
    return [grade, *indent(aligned([], rows, most=WITHIN))]


def _artifacts(result: Json) -> list[str]:
    rows = [
        [item["name"], f"{item['bytes']:,}", item["media_type"], item["sha256"][:16]]
        for item in result.get("artifacts") or []
    ]
    return section("artifacts", ["name", "bytes", "media type", "sha256 (begins)"], rows)


# -- pieces -----------------------------------------------------------------------------------------------------


def _span(pair: Sequence[float | None] | None, unit: Scale) -> str:
    if pair is None or None in pair:
        return "-"
    return f"{measure(pair[0], unit)} .. {measure(pair[1], unit)}"


def _evidence(evidence: Json) -> str:
    return ", ".join(f"{key} {_listed(value)}" for key, value in evidence.items() if value not in ({}, [], ""))


def _listed(value: Any) -> str:
    """Numbers of a list in brackets: `cores [0]` is core 0, not none."""
    are_numbers = isinstance(value, list) and all(isinstance(item, (int, float)) for item in value)
    return f"[{', '.join(map(cell, value))}]" if are_numbers else cell(value)


def _plain(line: str) -> str:
    """No control characters: names come from whoever wrote the spec, and this is shown on terminals."""
    return "".join(character if character.isprintable() else "�" for character in line)
