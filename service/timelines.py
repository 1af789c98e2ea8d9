"""Spans as a timeline: a row for every contestant and place, a bar for every piece of work, all from time 0.

    rows_of(spans)               # ["serial, rank 0", "concurrent, rank 0", "concurrent, rank 1"]
    picture(spans, colours, 620)

A row is named by the span's contestant (`of`) and by what of its point (`at`) differs between the spans; a colour is
the span's name (compute, copy), a shade of one where there are more names than colours. What a row does at the same
time as another stands below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchstone.quantities import scale

Json = Mapping[str, Any]
_MOST_SPANS = 2000
_ROW_HEIGHT = 30
_BAR_HEIGHT = 18
_MOST_SHADES = 4
_LIGHTEST = 0.6
"""The share of white in the last shade of a colour."""


def rows_of(spans: Sequence[Json]) -> list[str]:
    """The names of the rows, in the order in which they first appear."""
    return list(dict.fromkeys(_labels(spans)))


def note(spans: Sequence[Json]) -> str:
    """What is not shown."""
    return f"the first {_MOST_SPANS:,} of {len(spans):,} spans" if len(spans) > _MOST_SPANS else ""


def picture(spans: Sequence[Json], colours: Sequence[str], width: int) -> Any:
    """The bars as an altair chart, without title."""
    import altair as alt

    spans = spans[:_MOST_SPANS]
    labels, rows = _labels(spans), rows_of(spans)
    names = list(dict.fromkeys(str(span["name"]) for span in spans))
    unit = scale([max(span["end_s"] for span in spans)], "s")
    bars = [
        {
            "row": label,
            "name": str(span["name"]).replace("_", " "),
            "start": span["start_s"] * unit.factor,
            "end": span["end_s"] * unit.factor,
        }
        for span, label in zip(spans, labels, strict=True)
    ]
    bars.sort(key=lambda bar: bar["start"] - bar["end"])  # the longest first: what is within it is drawn over it
    shown = [name.replace("_", " ") for name in names]
    colour = alt.Color("name:N").title(None)
    colour = colour.scale(domain=shown, range=colours_of(names, colours))
    return (
        alt.Chart(alt.InlineData(values=bars))
        .mark_bar(height=_BAR_HEIGHT, stroke="white", strokeWidth=0.75)
        .encode(
            alt.X("start:Q").title(unit.unit).scale(zero=True, nice=False).axis(grid=True, tickCount=8),
            alt.X2("end:Q"),
            alt.Y("row:N").title(None).sort(rows).axis(labelLimit=260),
            colour.legend(symbolType="square"),
        )
        .properties(width=width, height=_ROW_HEIGHT * len(rows))
    )


def colours_of(names: Sequence[str], colours: Sequence[str]) -> list[str]:
    """A colour for each name, no two alike. Where there are more names than colours, those that differ in a number at
    their end (push 1, push 2) are shades of one; where that gives too many shades of one, any names share a colour."""
    if len(names) <= len(colours):
        return list(colours[: len(names)])
    kinds = [name.rstrip("0123456789 _") or name for name in names]
    slots = _slots(kinds, len(colours))
    if max(map(slots.count, slots)) > _MOST_SHADES:
        slots = _slots(names, len(colours))
    found = []
    for index, slot in enumerate(slots):
        place, shades = slots[:index].count(slot), slots.count(slot)
        found.append(_lighter(colours[slot], _LIGHTEST * place / max(shades - 1, 1)))
    return found


def _slots(kinds: Sequence[str], count: int) -> list[int]:
    """Which of `count` colours each is given: equal kinds the same one."""
    order = list(dict.fromkeys(kinds))
    return [order.index(kind) % count for kind in kinds]


def _lighter(colour: str, share: float) -> str:
    """Mixed with so much white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + share * (255 - part)):02X}" for part in parts)


def _labels(spans: Sequence[Json]) -> list[str]:
    """The row of each span."""
    ats = [{key: value for key, value in (span.get("at") or {}).items() if key != "part"} for span in spans]
    keys = list(dict.fromkeys(key for at in ats for key in at))
    telling = [key for key in keys if len({str(at.get(key)) for at in ats}) > 1]
    return [
        ", ".join([str(span["of"]), *(f"{key.replace('_', ' ')} {at[key]}" for key in telling if key in at)])
        for span, at in zip(spans, ats, strict=True)
    ]
