"""Curves as pictures: which charts a result has, what they show, and how they are served."""

from __future__ import annotations

import asyncio
import colorsys
import itertools
import math
import re
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from service import charts, timelines
from service.app import create_app
from tests.torchstone.store_samples import claim, submit, up
from torchstone.jobs import State
from torchstone.results import Curve, Result, Span
from torchstone.settings import Settings
from torchstone.store import Store, leases


def curve(of: str, y: list[float | None], name: str = "test_accuracy", **more: Any) -> Curve:
    given = {"x_name": "epoch", "y_name": "accuracy", "x": list(range(1, len(y) + 1)), **more}
    return Curve(name=name, of=of, y=y, **given)


def trained() -> Result:
    """What a training with two strategies and two ranks has to draw."""
    return Result(
        curves=[
            curve("single", [0.5, 0.7, 0.8]),
            curve("ddp", [0.5, 0.7, 0.8]),
            curve("single", [0.5, 0.7, 0.8], x_name="s", x=[2.5, 5.0, 7.5]),
            curve("ddp", [0.5, 0.7, 0.8], x_name="s", x=[1.5, 3.0, 4.5]),
            curve("single", [1.5, None, None], name="train_loss", y_name="loss"),
            curve("ddp", [0.1, 0.2], name="rank_loss", y_name="loss", x_name="step", at={"devices": 2, "rank": 0}),
            curve("ddp", [0.3, 0.2], name="rank_loss", y_name="loss", x_name="step", at={"devices": 2, "rank": 1}),
            curve("ddp", [None], name="nothing"),
        ]
    )


def job(result: Result, **more: Any) -> dict[str, Any]:
    return {"name": "<b>digits</b> & co", "spec": {}, "attempts": [], "result": result.model_dump(), **more}


def words_of(svg: bytes) -> str:
    return " | ".join(e.text or "" for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))


def test_one_chart_for_each_kind_of_curve() -> None:
    found = {chart.name: (chart.title, len(chart.curves)) for chart in charts.charts_of(job(trained()))}
    assert found == {
        "accuracy": ("Test accuracy by epoch", 2),
        "accuracy_by_second": ("Test accuracy over time", 2),
        "loss": ("Train loss by epoch", 1),
        "rank_loss": ("Rank loss by step", 2),
    }
    assert charts.charts_of(job(Result())) == [] and charts.charts_of({"result": None}) == []


def test_a_picture_names_its_lines_its_axes_and_the_job() -> None:
    spec = {"model": {"preset": "lenet"}, "dataset": {"name": "digits"}, "batch_size": 64}
    told = job(trained(), spec=spec, attempts=[{"devices": ["cpu:0", "cpu:1"]}])
    chart = charts.find(told, "accuracy")
    assert chart is not None
    words = words_of(charts.draw(chart, "svg"))
    for word in (
        "single",
        "ddp",
        "epoch",
        "Test accuracy by epoch",
        "<b>digits</b> & co",
        "lenet on digits",
        "cpu:1",
        "80%",
    ):
        assert word in words
    by_rank = charts.find(told, "rank_loss")
    assert by_rank is not None
    assert "ddp, rank 0 | ddp, rank 1" in words_of(charts.draw(by_rank, "svg"))


def test_a_png_is_twice_as_large_as_the_svg() -> None:
    chart = charts.find(job(trained()), "loss")
    assert chart is not None
    png, svg = charts.draw(chart, "png"), ElementTree.fromstring(charts.draw(chart, "svg"))
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == tuple(2 * int(svg.attrib[side]) for side in ("width", "height"))


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    long = curve("ddp", [0.0] * 9998 + [0.9], x_name="step")
    (chart,) = charts.charts_of(job(Result(curves=[long])))
    points = charts._points(chart.curves[0], "ddp")
    assert 500 < len(points) <= 1001 and points[-1] == {"x": 9999, "y": 0.9, "of": "ddp"}
    assert len(charts.draw(chart, "svg")) < 100_000


def test_intervals_are_bars_where_they_are_known() -> None:
    def drawn(**more: Any) -> bytes:
        rates = curve("concurrent", [1.0, 1.8], "speedup", x_name="devices", y_name="speed-up", **more)
        (chart,) = charts.charts_of(job(Result(curves=[rates])))
        return charts.draw(chart, "svg")

    def bars(svg: bytes) -> int:
        groups = re.findall(rb'<g class="mark-rule role-mark.*?</g>', svg)
        return sum(group.count(b"<line") for group in groups)

    known = drawn(ci95=[None, (1.6, 1.9)])
    assert bars(known) == 1 and bars(drawn()) == 0
    assert "| speed-up |" in words_of(known), "the axis keeps its title"


def test_charts_of_numbers_that_no_logarithm_takes() -> None:
    sizes = [1, 2, 4, 8, 1000]
    within = {"x_name": "size_bytes", "y_name": "s", "x": sizes, "ci95": [(-1e-7, 1.0), None, None, None, (0.0, 2.0)]}
    rows = curve("cpu:0", [1e-6, None, 1e-5, 1e-4, 1.0], "time_per_call", **within)
    (chart,) = charts.charts_of(job(Result(curves=[rows, curve("cpu:1", [1.0], x=[None])])))
    for x_name in ("size_bytes", "size"):
        (chart,) = charts.charts_of(job(Result(curves=[rows.model_copy(update={"x_name": x_name})])))
        assert b"NaN" not in charts.draw(chart, "svg")


def test_lines_that_hide_one_another_differ_in_width() -> None:
    same, other = [0.1, 0.5, 0.9], [0.1, 0.7, 0.95]
    over = tuple(curve(of, list(same)).model_dump() for of in ("single", "scratch", "ddp"))
    widths = charts._widths(over, marked=True)
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3
    apart = (over[0], curve("ddp", list(other)).model_dump())
    assert len(set(charts._widths(apart, marked=True))) == 1


def timed() -> Result:
    """What a job with two parts has to draw as timelines, and a curve over sizes that double."""
    both = [
        Span(name=name, of=of, at={"part": "overlap", "devices": 2, "rank": rank}, start_s=start, end_s=start + 0.002)
        for of, name, rank, start in (
            ("serial", "compute", 0, 0.0),
            ("serial", "copy", 0, 0.002),
            ("overlapped", "compute", 0, 0.0),
            ("overlapped", "copy", 1, 0.001),
        )
    ]
    sizes = [1, 2, 4, 8, 16, 1000]
    return Result(
        spans=[*both, Span(name="draw", of="fed", at={"part": "feeding"}, start_s=0, end_s=2e-5)],
        curves=[curve("cpu:0", [1e-6 * x * x for x in sizes], "time_per_call", x_name="size", y_name="s", x=sizes)],
    )


def test_spans_are_a_timeline_for_each_part() -> None:
    found = {chart.name: chart for chart in charts.charts_of(job(timed()))}
    assert list(found) == ["time_per_call", "timeline_overlap", "timeline_feeding"]
    assert [chart.lines for chart in found.values()] == [1, 3, 1]
    words = words_of(charts.draw(found["timeline_overlap"], "svg"))
    for word in ("serial, rank 0", "overlapped, rank 0", "overlapped, rank 1", "compute", "copy", "Timeline: overlap"):
        assert word in words
    assert "devices 2" not in words, "what is the same everywhere names no row"
    assert "| ms" in words and "| µs" in words_of(charts.draw(found["timeline_feeding"], "svg"))
    (whole,) = charts.charts_of(job(Result(spans=[Span(name="compute", of="x", start_s=0, end_s=1)])))
    assert whole.name == "timeline"


STEP = ["forward", "backward 2", "push 2", "backward 1", "push 1", "update 2", "update 1", "pull 2", "pull 1"]
STEP += ["reduce 2", "reduce 1", "backward", "update"]
"""What a training step by hand and one by a backend are made of."""


def seen(colour: str) -> tuple[float, float, float]:
    """A colour's CIELAB coordinates: equal distances look about equally far apart."""
    linear = [(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for c in _rgb(colour)]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = [sum(m * c for m, c in zip(row, linear, strict=True)) / w for row, w in zip(rows, white, strict=True)]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _rgb(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


@pytest.mark.parametrize("names", [STEP, STEP[:8], [f"kernel {i}" for i in range(16)], list("abcdefghijklmnopqrst")])
def test_the_names_of_a_timeline_are_told_apart_by_their_colours(names: list[str]) -> None:
    found = timelines.colours_of(names, charts._COLOURS)
    distances = [math.dist(seen(a), seen(b)) for a, b in itertools.combinations(found, 2)]
    assert len(found) == len(names) and min(distances) > 8, "2 is just noticeable side by side"
    assert min(math.dist(seen(colour), seen("#FFFFFF")) for colour in found) > 20
    if len(names) <= len(charts._COLOURS):
        assert found == [*charts._COLOURS][: len(names)]


def test_what_happens_within_a_longer_span_is_drawn_over_it() -> None:
    spans = [
        Span(name="reduce", of="x", start_s=0.2, end_s=0.3),
        Span(name="backward", of="x", start_s=0.0, end_s=1.0),
    ]
    (chart,) = charts.charts_of(job(Result(spans=spans)))
    (bars,) = charts._describe_timeline(chart)["datasets"].values()
    assert [bar["name"] for bar in bars] == ["backward", "reduce"]


def test_any_number_of_names_has_as_many_colours_and_numbered_ones_are_shades() -> None:
    for count in (9, 40, 100):
        assert len(set(timelines.colours_of([f"op {i}" for i in range(count)], charts._COLOURS))) == count
    by_name = dict(zip(STEP, timelines.colours_of(STEP, charts._COLOURS), strict=True))

    def hue(name: str) -> float:
        return colorsys.rgb_to_hsv(*_rgb(by_name[name]))[0]

    for one, two in (("push 1", "push 2"), ("pull 1", "pull 2"), ("update 1", "update")):
        assert hue(one) == pytest.approx(hue(two), abs=0.02)
    spans = [Span(name=name, of="by_hand", start_s=i, end_s=i + 1) for i, name in enumerate(STEP)]
    (chart,) = charts.charts_of(job(Result(spans=spans)))
    bars = charts.draw(chart, "svg").decode()
    assert all(colour.lower() in bars.lower() for colour in by_name.values())


def test_a_timeline_too_long_for_a_picture_says_what_it_leaves_out() -> None:
    spans = [Span(name="step", of="x", start_s=i, end_s=i + 0.5) for i in range(2500)]
    (chart,) = charts.charts_of(job(Result(spans=spans)))
    assert "the first 2,000 of 2,500 spans" in words_of(charts.draw(chart, "svg"))


def test_sizes_that_double_and_times_that_span_decades_are_drawn_on_logarithmic_axes() -> None:
    chart = charts.find(job(timed()), "time_per_call")
    assert chart is not None
    axes = charts._describe(chart)["layer"][0]["encoding"]
    assert axes["x"]["scale"]["type"] == axes["y"]["scale"]["type"] == "log"
    assert "seconds" in words_of(charts.draw(chart, "svg"))
    accuracy = charts.find(job(trained()), "accuracy")
    assert accuracy is not None
    assert "type" not in charts._describe(accuracy)["layer"][0]["encoding"]["x"]["scale"]


def test_rates_are_told_in_thousands_and_counts_of_devices_as_whole_numbers() -> None:
    rates = curve("concurrent", list[float | None]([21e9, 39e9]), "compute_rate", x_name="devices", y_name="FLOP/s")
    chart = charts.find(job(Result(curves=[rates])), "compute_rate")
    assert chart is not None
    words = words_of(charts.draw(chart, "svg")).split(" | ")
    assert "Compute rate by devices" in words and "FLOP/s" in words
    assert "40G" in words or "35G" in words
    assert [word for word in words if word in ("1", "2", "1.5")] == ["1", "2"]


def test_marks_on_a_curve_are_points_and_no_second_curve() -> None:
    sizes, places = [4e3, 32e3, 1e6], [32e3, 1e6]
    ladder = curve("cache", list[float | None]([1e-9, 2e-9, 9e-9]), "latency", x=sizes)
    marks = curve("cache", list[float | None]([2e-9, 9e-9]), "latency", x=places, at={"marks": "sysfs"})
    chart = charts.find(job(Result(curves=[ladder, marks])), "latency")
    assert chart is not None
    line, points = charts._describe(chart)["layer"]
    assert line["mark"]["type"] == "line" and points["mark"]["type"] == "point"


def test_nothing_is_loaded_before_the_first_picture() -> None:
    code = "import service.app, sys; sys.exit(bool({'altair', 'vl_convert'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Over HTTP ------------------------------------------------------------------------------------------------------

Ask = Callable[[httpx.AsyncClient, str], Awaitable[None]]


def over_http(tmp_path: Path, store: Store, ask: Ask, result: Result | None) -> None:
    """Let `ask` query the app about a job, finished with `result` or, without one, running."""
    (job_id,) = submit(store, name="served")
    claimed = claim(store, up(store))
    if result is not None:
        with store.write() as conn:
            leases.finish(conn, claimed.holder, State.succeeded, result=result.to_json(), files=[])
    url = store.engine.url.render_as_string(hide_password=False)
    app = create_app(Settings(data=tmp_path / "data", database_url=url, reconcile_s=3600))

    async def serve() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t") as http,
        ):
            await ask(http, f"/v1/jobs/{job_id}")

    asyncio.run(serve())


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_charts_are_listed_served_and_not_sent_twice(tmp_path: Path, store: Store) -> None:
    async def ask(http: httpx.AsyncClient, path: str) -> None:
        assert (await http.get(path)).json()["links"]["charts"] == f"{path}/charts"
        items = (await http.get(f"{path}/charts")).json()["items"]
        assert [item["name"] for item in items] == ["accuracy", "accuracy_by_second", "loss", "rank_loss"]
        for form, media_type in charts.MEDIA_TYPES.items():
            answer = await http.get(items[0]["links"][form])
            assert answer.status_code == 200 and answer.headers["content-type"] == media_type
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await http.get(items[0]["links"][form], headers={"If-None-Match": answer.headers["etag"]})
            assert again.status_code == 304 and not again.content
        assert "served" in words_of((await http.get(f"{path}/charts/accuracy.svg")).content)
        for unknown in ("accuracy", "accuracy.pdf", "acuracy.svg", ".svg"):
            missing = await http.get(f"{path}/charts/{unknown}")
            assert missing.status_code == 404
            assert "accuracy, accuracy_by_second, loss, rank_loss" in missing.json()["detail"]

    over_http(tmp_path, store, ask, trained())


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_running_job_has_no_charts_yet(tmp_path: Path, store: Store) -> None:
    async def ask(http: httpx.AsyncClient, path: str) -> None:
        for url in (f"{path}/charts", f"{path}/charts/accuracy.svg"):
            assert (await http.get(url)).status_code == 409

    over_http(tmp_path, store, ask, None)
