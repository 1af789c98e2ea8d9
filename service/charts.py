"""A finished job's curves as pictures: one chart for each kind of curve, one line for each contestant.

    [chart.name for chart in charts_of(job)]         # ["accuracy", "accuracy_by_second", "loss", ...]
    picture = draw(find(job, "accuracy"), "svg")     # bytes; "png" is drawn at twice the size

Charts come from the one Result shape and know no kind of experiment. Altair writes the description, vl-convert renders
it without a browser; both are loaded by the first chart, so the service starts without them. Not covered: zooming and
reading off values, for which the curves are in result.json and result.csv.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
_WIDTH, _HEIGHT = 620, 340
_rendering = threading.Lock()


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes."""

    name: str
    title: str
    subtitle: str
    x_name: str
    y_name: str
    curves: tuple[Json, ...]


def charts_of(job: Json) -> list[Chart]:
    """The charts that a job's result has, in the order of its curves; curves without a number are left out."""
    groups: dict[tuple[str, str], list[Json]] = {}
    for curve in (job.get("result") or {}).get("curves") or []:
        if any(y is not None for y in curve["y"]):
            groups.setdefault((curve["name"], curve["x_name"]), []).append(curve)
    first_x: dict[str, str] = {}
    found = []
    for (name, x_name), curves in groups.items():
        by = "" if first_x.setdefault(name, x_name) == x_name else f"_by_{_over(x_name)}"
        title = f"{_words(name).capitalize()} {'over time' if x_name in _TIMES else f'by {_words(x_name)}'}"
        y_name = str(curves[0]["y_name"])
        found.append(Chart(f"{_SHORT.get(name, name)}{by}", title, _subtitle(job), x_name, y_name, tuple(curves)))
    return found


def find(job: Json, name: str) -> Chart | None:
    """The chart called so."""
    return next((chart for chart in charts_of(job) if chart.name == name), None)


def draw(chart: Chart, form: Format) -> bytes:
    """The picture. Takes a few seconds the first time in a process, then about 0.1 s; one at a time."""
    import vl_convert

    with _rendering:
        specification = _describe(chart)
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
    x = alt.X("x:Q").title(_axis_title(chart.x_name)).scale(nice=False, zero=chart.x_name in _TIMES)
    ticks: dict[str, Any] = {"format": "d", "tickMinStep": 1} if is_whole else {}
    x = x.axis(grid=False, tickCount=8, labelFlush=False, **ticks)
    y = alt.Y("y:Q").title(_axis_title(chart.y_name)).scale(zero=False)
    y = y.axis(format="~%" if chart.y_name == "accuracy" else "~g", tickCount=6)
    if chart.x_name.endswith("_bytes"):  # from one cache's size to memory's: equal factors, equal distances
        x = x.axis(format="~s", tickMinStep=alt.Undefined)
        x, y = (_by_factors(axis, [row[key] for row in rows]) for axis, key in ((x, "x"), (y, "y")))
    colour = alt.Color("of:N").title(None).scale(domain=labels, range=colours)
    layers = []
    for label, width in zip(labels, _widths(chart.curves, marked), strict=True):
        line = alt.Chart().transform_filter(alt.datum.of == label)
        point = {"filled": True, "size": 28 + 10 * width, "opacity": 1} if marked else False
        layers.append(line.mark_line(strokeWidth=width, point=point, strokeJoin="round").encode(x, y, colour))
    title = alt.TitleParams(chart.title, subtitle=chart.subtitle, anchor="start", offset=14)
    picture = alt.layer(*layers, data=alt.InlineData(values=rows)).properties(
        title=title, width=_WIDTH, height=_HEIGHT, background="white", padding=18
    )
    description: dict[str, Any] = picture.configure(**_LOOK).to_dict()
    return description


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
    "legend": {"labelFontSize": 12.5, "labelColor": _INK, "symbolType": "stroke", "symbolStrokeWidth": 3, "offset": 16},
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
    both = [(x, y) for x, y in zip(curve["x"], curve["y"], strict=True) if x is not None]
    step = -(-len(both) // _MOST_POINTS)
    kept = both[::step] if step > 1 else both
    if kept and kept[-1] != both[-1]:
        kept.append(both[-1])
    return [{"x": x, "y": y, "of": label} for x, y in kept]


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
