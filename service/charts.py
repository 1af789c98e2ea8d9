"""A finished job's curves and timelines as pictures: one chart for each kind of curve, a line for each contestant.

    [chart.name for chart in charts_of(job)]         # ["accuracy", "accuracy_by_second", "loss", "timeline", ...]
    picture = draw(find(job, "accuracy"), "svg")     # bytes; "png" is drawn at twice the size

Spans become a timeline (`service.timelines`), one for each value of `at["part"]` where they have one. Charts come from
the one Result shape and know no kind of experiment. Altair writes the description, vl-convert renders it without a
browser; both are loaded by the first chart, so the service starts without them. 95 % intervals are bars. Not covered:
zooming and reading off values, for which the curves are in result.json and result.csv.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from service import timelines

Json = Mapping[str, Any]
Format = Literal["svg", "png"]
MEDIA_TYPES: dict[Format, str] = {"svg": "image/svg+xml", "png": "image/png"}

_SHORT = {"test_accuracy": "accuracy", "train_loss": "loss"}
_TIMES = ("s", "second", "seconds")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#A08000")
"""Okabe and Ito's, told apart by colour-blind eyes too; their yellow darkened, which is hard to see on white."""
_INK, _FAINT, _GRID = "#1b1f24", "#59636e", "#e4e8ec"
_MOST_POINTS = 1000
_LOGARITHMIC_FROM = 20
_MOST_MARKED = 60
_MOST_TICKS = 8
_WIDE = 30
_WIDTH, _HEIGHT = 620, 340
_rendering = threading.Lock()


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes, or the spans of a timeline."""

    name: str
    title: str
    subtitle: str
    x_name: str
    y_name: str
    curves: tuple[Json, ...] = ()
    spans: tuple[Json, ...] = ()

    @property
    def lines(self) -> int:
        """How many curves it shows, or rows of a timeline."""
        return len(self.curves) or len(timelines.rows_of(self.spans))


def charts_of(job: Json) -> list[Chart]:
    """The charts that a job's result has, in the order of its curves, then of its spans.

    Curves without a number are left out.
    """
    return [*_of_curves(job), *_of_spans(job)]


def _of_curves(job: Json) -> list[Chart]:
    groups: dict[tuple[str, str], list[Json]] = {}
    for curve in (job.get("result") or {}).get("curves") or []:
        if any(x is not None and y is not None for x, y in zip(curve["x"], curve["y"], strict=True)):
            groups.setdefault((curve["name"], curve["x_name"]), []).append(curve)
    first_x: dict[str, str] = {}
    found = []
    for (name, x_name), curves in groups.items():
        by = "" if first_x.setdefault(name, x_name) == x_name else f"_by_{_over(x_name)}"
        title = f"{_words(name).capitalize()} {'over time' if x_name in _TIMES else f'by {_words(x_name)}'}"
        y_name = str(curves[0]["y_name"])
        found.append(Chart(f"{_SHORT.get(name, name)}{by}", title, _subtitle(job), x_name, y_name, tuple(curves)))
    return found


def _of_spans(job: Json) -> list[Chart]:
    parts: dict[str, list[Json]] = {}
    for span in (job.get("result") or {}).get("spans") or []:
        parts.setdefault(str((span.get("at") or {}).get("part", "")), []).append(span)
    return [
        Chart(
            f"timeline_{part}" if part else "timeline",
            f"Timeline: {_words(part)}" if part else "Timeline",
            _subtitle(job),
            "time",
            "",
            spans=tuple(spans),
        )
        for part, spans in parts.items()
    ]


def find(job: Json, name: str) -> Chart | None:
    """The chart called so."""
    return next((chart for chart in charts_of(job) if chart.name == name), None)


def draw(chart: Chart, form: Format) -> bytes:
    """The picture. Takes a few seconds the first time in a process, then about 0.1 s; one at a time."""
    import vl_convert

    with _rendering:
        specification = _describe_timeline(chart) if chart.spans else _describe(chart)
        if form == "png":
            return bytes(vl_convert.vegalite_to_png(specification, scale=2))
        return str(vl_convert.vegalite_to_svg(specification)).encode()


def _describe(chart: Chart) -> dict[str, Any]:
    import altair as alt

    labels = _labels(chart.curves)
    rows = [row for curve, label in zip(chart.curves, labels, strict=True) for row in _points(curve, label)]
    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(labels))]
    is_whole = all(float(row["x"]).is_integer() for row in rows)
    marked = len(rows) <= _MOST_MARKED * len(labels)
    x = alt.X("x:Q").title(_axis_title(chart.x_name))
    is_time = chart.y_name in _TIMES
    y = alt.Y("y:Q").title("seconds" if is_time else _axis_title(chart.y_name)).scale(zero=False)
    if is_time and _is_wide(rows):
        y = y.scale(type="log", nice=True)
    in_thousands = is_time or chart.y_name.endswith(("/s", "_per_s"))
    y = y.axis(format="~%" if chart.y_name == "accuracy" else "~s" if in_thousands else "~g", tickCount=6)
    if chart.x_name.endswith("_bytes"):  # from one cache's size to memory's: equal factors, equal distances
        x = x.axis(grid=False, format="~s", labelFlush=False)
        x, y = _by_factors(x, _values(rows, "x")), _by_factors(y, _values(rows, "y", "low"))
    elif _is_geometric(chart.curves):
        x = x.scale(type="log", base=2, nice=False).axis(grid=False, format="~g", labelFlush=False)
    else:
        ticks: dict[str, Any] = {"format": "d", "tickMinStep": 1} if is_whole else {}
        xs = sorted({row["x"] for row in rows})
        if is_whole and len(xs) <= _MOST_TICKS:  # else there are ticks between them, which "d" rounds to the next one
            ticks["values"] = xs
        x = x.scale(nice=False, zero=chart.x_name in _TIMES)
        x = x.axis(grid=False, tickCount=_MOST_TICKS, labelFlush=False, **ticks)
    colour = alt.Color("of:N").title(None).scale(domain=labels, range=colours)
    layers = []
    for label, curve, width in zip(labels, chart.curves, _widths(chart.curves, marked), strict=True):
        line = alt.Chart().transform_filter(alt.datum.of == label)
        if "marks" in (curve.get("at") or {}):  # places on another curve, with nothing between them
            layers.append(line.mark_point(shape="diamond", size=140, strokeWidth=2).encode(x, y, colour))
            continue
        point = {"filled": True, "size": 28 + 10 * width, "opacity": 1} if marked else False
        layers.append(line.mark_line(strokeWidth=width, point=point, strokeJoin="round").encode(x, y, colour))
        if curve.get("ci95"):
            ends = line.transform_filter("isValid(datum.low)").mark_errorbar(ticks=True, thickness=1.5)
            low = y.copy()
            low.shorthand = "low:Q"
            layers.append(ends.encode(x, low, alt.Y2("high:Q"), colour))
    title = alt.TitleParams(chart.title, subtitle=chart.subtitle, anchor="start", offset=14)
    picture = alt.layer(*layers, data=alt.InlineData(values=rows)).properties(
        title=title, width=_WIDTH, height=_HEIGHT, background="white", padding=18
    )
    description: dict[str, Any] = picture.configure(**_LOOK).to_dict()
    return description


def _describe_timeline(chart: Chart) -> dict[str, Any]:
    import altair as alt

    picture = timelines.picture(chart.spans, _COLOURS, _WIDTH)
    subtitle = "  ·  ".join(word for word in (chart.subtitle, timelines.note(chart.spans)) if word)
    title = alt.TitleParams(chart.title, subtitle=subtitle, anchor="start", offset=14)
    picture = picture.properties(title=title, background="white", padding=18)
    description: dict[str, Any] = picture.configure(**_LOOK).to_dict()
    return description


def _is_geometric(curves: tuple[Json, ...]) -> bool:
    """Whether every x is at least 1.5 times the one before: sizes that double, say."""
    xs = [[x for x in curve["x"] if x is not None] for curve in curves]
    pairs = [(a, b) for x in xs for a, b in itertools.pairwise(x)]
    return min(map(len, xs)) >= 5 and all(a > 0 and b >= 1.5 * a for a, b in pairs)


def _is_wide(rows: list[dict[str, Any]]) -> bool:
    """Whether the largest y is so many times the smallest that a linear axis would show but the largest."""
    ys = _values(rows, "y", "low")
    return bool(min(ys) > 0 and max(ys) >= _WIDE * min(ys))


def _values(rows: list[dict[str, Any]], *keys: str) -> list[float]:
    return [row[key] for row in rows for key in keys if row.get(key) is not None]


def _by_factors(axis: Any, values: list[float]) -> Any:
    """The axis with a logarithmic scale where the values span enough for one."""
    if min(values) <= 0 or max(values) < _LOGARITHMIC_FROM * min(values):
        return axis
    return axis.scale(type="log", nice=False)


_LOOK: dict[str, Any] = {
    "font": "Helvetica, Arial, Liberation Sans, sans-serif",
    "view": {"stroke": None},
    "title": {
        "fontSize": 17,
        "fontWeight": 600,
        "color": _INK,
        "subtitleFontSize": 12,
        "subtitleColor": _FAINT,
        "subtitlePadding": 5,
    },
    "axis": {
        "labelFontSize": 12,
        "titleFontSize": 12.5,
        "titleFontWeight": 500,
        "labelColor": _FAINT,
        "titleColor": _INK,
        "titlePadding": 10,
        "gridColor": _GRID,
        "domainColor": _FAINT,
        "tickColor": _FAINT,
    },
    "axisY": {"domain": False, "ticks": False, "labelPadding": 8},
    "legend": {
        "labelFontSize": 12.5,
        "labelColor": _INK,
        "symbolType": "stroke",
        "symbolStrokeWidth": 3,
        "offset": 16,
        "labelLimit": 300,
    },
}


def _labels(curves: tuple[Json, ...]) -> list[str]:
    """A line's name: its contestant, and of `at` what tells it from another of the same contestant."""
    ats = [curve.get("at") or {} for curve in curves]
    keys = list(dict.fromkeys(key for at in ats for key in at))
    telling = [key for key in keys if len({str(at.get(key)) for at in ats}) > 1]
    labels: list[str] = []
    for curve, at in zip(curves, ats, strict=True):
        words = [f"{_words(key)} {at[key]}" for key in telling if key in at]
        label = ", ".join([str(curve["of"]), *words])
        labels.append(label if label not in labels else f"{label} ({len(labels) + 1})")
    return labels


def _widths(curves: tuple[Json, ...], marked: bool) -> list[float]:
    """Widths of the lines, thinner on top of wider where lines would hide one another: equal strategies often do."""
    if not marked:
        return [1.25] * len(curves)
    ys = [y for curve in curves for y in curve["y"] if y is not None]
    near = 0.004 * (max(ys) - min(ys))
    hidden = any(_coincide(a, b, near) for i, a in enumerate(curves) for b in curves[:i])
    if not hidden:
        return [2.25] * len(curves)
    return [2 + 2.25 * min(1.0, 3 / len(curves)) * (len(curves) - 1 - i) for i in range(len(curves))]


def _coincide(a: Json, b: Json, near: float) -> bool:
    pairs = list(zip(a["x"], a["y"], b["x"], b["y"], strict=False))
    close = [ax == bx and ay is not None and by is not None and abs(ay - by) <= near for ax, ay, bx, by in pairs]
    return close.count(True) > 0.5 * len(pairs)


def _points(curve: Json, label: str) -> list[dict[str, Any]]:
    """The points to draw: every nth where there are more than a picture can show, and always the last."""
    intervals = curve.get("ci95") or [None] * len(curve["y"])
    found = [point for point in zip(curve["x"], curve["y"], intervals, strict=True) if point[0] is not None]
    step = -(-len(found) // _MOST_POINTS)
    kept = found[::step] if step > 1 else found
    if kept and kept[-1] != found[-1]:
        kept.append(found[-1])
    return [{"x": x, "y": y, "of": label, **_ends(interval)} for x, y, interval in kept]


def _ends(interval: Any) -> dict[str, float]:
    return {"low": interval[0], "high": interval[1]} if interval else {}


def _subtitle(job: Json) -> str:
    spec = job.get("spec") or {}
    attempts = job.get("attempts") or []
    words = [job.get("name"), *_what(spec), ", ".join(attempts[-1]["devices"]) if attempts else None]
    text = "  ·  ".join(str(word) for word in words if word)
    return text if len(text) <= 110 else text[:109] + "…"


def _what(spec: Json) -> list[str]:
    """In a few words: the model, its data and the batch size, as far as the spec has them."""
    model, dataset = spec.get("model") or {}, spec.get("dataset") or {}
    network = model.get("preset") or (f"{len(model['layers'])} layers" if model.get("layers") else None)
    data = dataset.get("name") or next(iter(dataset), None)
    found = [f"{network} on {data}" if network and data else network]
    found.append(f"batch size {spec['batch_size']}" if spec.get("batch_size") else None)
    return [word for word in found if word]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _over(x_name: str) -> str:
    return "second" if x_name in _TIMES else x_name


def _axis_title(name: str) -> str:
    return "seconds of training" if name in _TIMES else _words(name)
