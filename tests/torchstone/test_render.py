"""The table and the CSV, on a result with every section filled, on odd ones, and on jobs in every state."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.torchstone.sample_jobs import ID, full_result, job, timing
from torchstone import render
from torchstone.columns import aligned
from torchstone.jobs import State
from torchstone.quantities import error, number, quantity, scale
from torchstone.results import Check, Code, Comparison, Curve, Figure, Quality, Result, Span, Table


def row_of(text: str, *words: str) -> str:
    """The one line that begins with these words."""
    pattern = re.compile(r"\s*" + r"\s+".join(map(re.escape, words)) + r"(\s|$)")
    (line,) = [line for line in text.splitlines() if pattern.match(line)]
    return line


def test_a_timing_stands_in_one_row_with_its_speedup_and_its_check() -> None:
    text = render.text(job(result=full_result()))
    script = row_of(text, "script", "1", "240")
    assert re.search(r"15\.00  14\.25 \.\. 16\.50 .*1\.333x  1\.300 \.\. 1\.360  faster +equal bit by bit", script)
    assert row_of(text, "eager", "1", "240").endswith("baseline")
    assert row_of(text, "trace", "1").endswith("withheld (its output differs)  FAILED")
    assert "median µs" in text


def test_nothing_of_a_result_is_left_out() -> None:
    text = render.text(job(result=full_result()))
    for piece in (
        "Example CPU @ 2.4 GHz, cores 0, 1 of 4, 16 GB, Linux-6.1, 2 threads",
        "torch 2.13.0, numpy 2.4.6, torchstone 0.1.0, Python 3.11.7",
        "cpu:0 on a",
        "12.50 GB/s",
        "one device only",
        "3 by epoch",
        "aten::mm, in place",
        "this host has no CUDA device",
        "quality: suspect, noise floor 3.12 %",
        "at batch_size=1, noise_floor 0.03123, asked 0.01000",
        "one-sided NaN",
        "662,104",
    ):
        assert piece in text, piece


def test_a_comparison_that_fits_no_timing_has_a_section_of_its_own() -> None:
    assert row_of(render.text(job(result=full_result())), "scaling", "ddp", "single").endswith("1.800 .. 2.000  faster")


def test_a_second_baseline_is_not_lost() -> None:
    def against(baseline: str) -> Comparison:
        return Comparison(
            name="latency",
            of="script",
            against=baseline,
            at={"batch_size": 1},
            speedup=1.5,
            ci95=None,
            noise_floor=None,
            verdict="inconclusive",
        )

    result = Result(timings=[timing("script", 1e-3)], comparisons=[against("eager"), against("trace")])
    assert "trace" in row_of(render.text(job(result=result)), "latency", "script")


def test_what_one_sample_or_a_check_without_an_error_cannot_tell_is_not_shown() -> None:
    once = timing("eager", 1e-3).model_copy(update={"n": 1, "iqr": 0.0, "p10": None, "p90": None, "ci95": None})
    check = Check(name="right", of="eager", against="known", passed=True)
    text = render.text(job(result=Result(timings=[once, timing("script", 2e-3)], checks=[check])))
    eager, script = row_of(text, "eager").split(), row_of(text, "script").split()
    assert eager[3:7] == ["1.000", "-", "-", "-"] and "0.160" in script
    assert eager[-1] == "passed" and "passed, error" not in text
    quality = Quality(grade="suspect", codes=[Code(code="slow", severity="warning", evidence={"at": {}, "asked": 0})])
    assert row_of(render.text(job(result=Result(quality=quality))), "slow").endswith("warning  asked 0")


@pytest.mark.parametrize("state", [*State])
def test_every_state_can_be_shown(state: State) -> None:
    assert state.value in render.text(job(state.value))
    assert next(csv.reader(io.StringIO(render.csv(job(state.value))))) == [
        "section",
        "name",
        "of",
        "field",
        "value",
        "unit",
    ]


def test_figures_stand_side_by_side_while_there_are_few_contestants() -> None:
    def result(contestants: int) -> Result:
        names = [f"way{i}" for i in range(contestants)]
        return Result(
            figures=[
                *(Figure(name="throughput", of=of, at={"batch_size": 1}, value=100.5, unit="1") for of in names),
                Figure(name="break_even_calls", of="way0", value=None, unit="calls", reason="it is not faster"),
                Figure.model_validate({"name": "roofline", "of": "way1", "value": 3.3, "unit": "1", "note": "over 1"}),
            ]
        )

    few = render.text(job(result=result(2)))
    assert row_of(few, "throughput", "batch_size=1", "100.5", "100.5")
    assert row_of(few, "break_even_calls").endswith("way0: it is not faster")
    assert row_of(few, "roofline").endswith("way1: over 1")
    many = render.text(job(result=result(12)))
    assert row_of(many, "throughput", "way11", "batch_size=1", "100.5")


def test_checks_that_passed_at_many_points_are_one_line_and_each_failure_is_its_own() -> None:
    def check(inputs: str, passed: bool, max_abs_error: float) -> Check:
        return Check(
            name="generalises",
            of="script",
            against="eager",
            at={"inputs": inputs},
            passed=passed,
            max_abs_error=max_abs_error,
        )

    checks = [check("a", True, 1e-7), check("b", True, 1e-6), check("c", False, 0.5), check("d", False, 0.6)]
    text = render.text(job(result=Result(checks=checks)))
    assert re.search(r"inputs=a\|b +passed +1\.0e-06", text)
    assert re.search(r"inputs=c +FAILED +5\.0e-01", text)
    assert re.search(r"inputs=d +FAILED +6\.0e-01", text)


def test_a_figure_shows_its_interval_below_and_rows_of_one_name_stand_together() -> None:
    figures = [
        Figure(name="peak_bytes", of="single", at={"rank": 0}, value=2e6, unit="B"),
        Figure(name="scaling_efficiency", of="ddp", value=0.95, unit="1", ci95=[0.934, 0.9621]),
        Figure(name="peak_bytes", of="ddp", at={"rank": 0}, value=3e6, unit="B"),
        Figure(name="peak_bytes", of="ddp", at={"rank": 1}, value=4e6, unit="B"),
    ]
    text = render.text(job(result=Result(figures=figures)))
    lines = [" ".join(line.split()) for line in text[text.index("figures\n") :].splitlines()]
    assert lines[3:7] == [
        "peak_bytes rank=0 2 MB 3 MB",
        "peak_bytes rank=1 4 MB",
        "scaling_efficiency 0.9500",
        "95 % interval 0.9340 .. 0.9621",
    ]


def test_passed_checks_of_one_kind_mark_the_timing_that_they_agree_with() -> None:
    def check(what: str, passed: bool = True, of: str = "ddp") -> Check:
        at = {"steps": 3, "what": what}
        given = {"max_abs_error": 2e-7, "rtol": 1e-3, "atol": 1e-6}
        return Check(name="equal_to_single", of=of, against="single", at=at, passed=passed, **given)

    epochs = [timing(of, 1.0).model_copy(update={"name": "epoch", "at": {}}) for of in ("ddp", "fsdp", "single")]
    checks = [check("loss"), check("weights"), check("loss", of="fsdp"), check("weights", False, of="fsdp")]
    text = render.text(job(result=Result(timings=epochs, checks=checks)))
    assert row_of(text, "ddp", "240").endswith("passed, error 2.0e-07")
    assert row_of(text, "fsdp", "240").endswith("FAILED")
    assert "steps=3, what=loss|weights  passed" in row_of(text, "equal_to_single", "ddp")
    assert len(re.findall(r"equal_to_single +fsdp .*(FAILED|passed)", text)) == 2


def of_parts() -> Result:
    """Two parts whose contestants share the timings' names, and one note that many rows need."""
    timings, comparisons = [], []
    for part, names in (("concurrency", ("alone", "sequential")), ("overlap", ("products", "maker")), ("steps", ())):
        for of in names:
            at = {"part": part, "devices": 1} if part == "concurrency" else {"part": part}
            timings.append(timing(of, 1e-3).model_copy(update={"name": "compute", "at": at}))
        update = {"name": "noise", "at": {"part": part}}
        timings.append(timing(f"{part}_again", 1e-3).model_copy(update=update))
    for of in ("alone", "sequential"):
        comparisons.append(
            Comparison(
                name="compute",
                of=of,
                against="none",
                at={"part": "concurrency", "devices": 1},
                speedup=1.5,
                ci95=None,
                noise_floor=None,
                verdict="inconclusive",
                reason=WHY,
            )
        )
    figures = [Figure(name="roofline", of=f"way{i}", value=None, unit="1", reason=WHY) for i in range(12)]
    figures.append(Figure(name="rate", of="way1", value=2.0, unit="1", method="of medians"))
    codes = [Code(code="note", severity="info", evidence={"text": "many words " * 20})]
    spans = [Span(name=f"push {i}", of="x", start_s=i, end_s=i + 1) for i in range(30)]
    return Result(timings=timings, comparisons=comparisons, figures=figures, quality=Quality(codes=codes), spans=spans)


WHY = "this host has no hardware report, and nothing is known of what it could reach at best"


def test_each_part_has_tables_of_its_own_where_that_leaves_rows_to_them() -> None:
    text = render.text(job(result=of_parts()))
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")][1:]
    assert titles[:3] == ["concurrency: compute", "overlap: compute", "noise"]
    first, second, noise = (section.splitlines() for section in text.split("\n\n")[1:4])
    assert "devices" in first[1] and "part" not in first[1]
    assert "devices" not in second[1] and "part" not in second[1]
    assert "part" in noise[1] and len(noise) == 3 + 3


def test_a_long_reason_stands_once_below_its_table() -> None:
    text = render.text(job(result=of_parts()))
    compute, figures = (next(s for s in text.split("\n\n") if s.startswith(t)) for t in ("concurrency", "figures"))
    for section, rows in ((compute, 2), (figures, 1)):
        assert section.count("[1]") == rows + 1 and section.count(WHY) == 1
    assert re.search(r"roofline +way0 and 11 more +\[1\]", figures), "null for one reason is one row"
    assert row_of(figures, "rate", "way1").endswith("of medians"), "a short one stays in its row"


def test_long_notes_are_folded_and_long_timelines_cut() -> None:
    text = render.text(job(result=of_parts()))
    assert " ".join(text.split()).count("many words") == 20
    assert max(map(len, text.splitlines())) <= 120
    spans = next(s for s in text.split("\n\n") if s.startswith("spans")).splitlines()
    assert len(spans) == 3 + 12 + 1
    assert spans[-1] == f"  ... and 18 more: see result.csv, and as pictures /v1/jobs/{ID}/charts"
    assert len(render.csv(job(result=of_parts())).split("push")) == 1 + 2 * 30


def test_the_value_of_a_best_repeat_is_told_from_the_interval_of_the_median() -> None:
    def reading(of: str, statistic: str) -> Figure:
        more = {"ci95": [3.1e9, 4.4e9], "statistic": statistic}
        return Figure.model_validate({"name": "rate", "of": of, "value": 4.7e9, "unit": "B/s", **more})

    told = "[1] the value is the best repeat, the interval that of the median: it need not contain the value"
    many = [reading("memory", "best"), *(reading(f"way{i}", "median") for i in range(12))]
    text = render.text(job(result=Result(figures=many)))
    assert re.search(r"4\.700 GB/s +best \[1\] +3\.100 \.\. 4\.400$", row_of(text, "rate", "memory"))
    assert re.search(r"4\.700 GB/s +median +3\.100 \.\. 4\.400$", row_of(text, "rate", "way1"))
    assert text.count(told) == 1

    few = render.text(job(result=Result(figures=many[:1])))
    assert row_of(few, "95 % interval").endswith("3.100 .. 4.400  [1]") and few.count(told) == 1
    assert told not in render.text(job(result=Result(figures=many[1:2])))


def test_an_interval_without_an_end_takes_no_row() -> None:
    figure = Figure.model_validate({"name": "calls", "of": "way", "value": 3.0, "unit": "calls", "ci95": [1.0, None]})
    assert "95 % interval" not in render.text(job(result=Result(figures=[figure])))


def test_the_head_names_what_was_measured_where_that_is_more_than_the_job_holds() -> None:
    def head(*devices: str) -> str:
        result = full_result()
        assert result.environment is not None
        result.environment["hosts"][0]["devices"] = [{"name": name} for name in devices]
        return row_of(render.text(job(result=result)).split("\n\n")[0], "devices")

    assert head("cpu:0", "cpu:1").endswith("  cpu:0, cpu:1 on a, which the job had to itself")
    assert head("cpu:0").endswith("  cpu:0 on a")
    assert head().endswith("  cpu:0 on a")


def test_tables_of_words_and_the_head_are_folded() -> None:
    found = [["overlap", "many words " * 20], ["streams", "few words"]]
    figures = [Figure(name="roofline", of=f"way{i}", value=None, unit="1", reason=WHY) for i in range(2)]
    result = Result(tables=[Table(name="findings", columns=["part", "found"], rows=found)], figures=figures)
    text = render.text(job(result=result, spec={"kind": "jit", **{f"setting_{i}": i + 1 for i in range(20)}}))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert " ".join(text.split()).count("many words") == 20
    first = lines.index(row_of(text, "overlap", *["many words"] * 9))
    assert lines[first + 1].startswith(" " * lines[first].index("many") + "many words")
    spec = lines.index(row_of(text, "spec", "setting_0"))
    assert re.match(r" {12}\w", lines[spec + 1])


def test_columns_of_words_are_folded_and_none_of_numbers() -> None:
    rows = [
        ["reference to memory, small pages", "671.0 ns", "memory latency at pages=small"],
        ["fsync", "4 ms", "disk"],
    ]
    assert aligned(["event", "here", "how"], rows, 60) == [
        "event                         here  how",
        "------------------------  --------  ------------------------",
        "reference to memory,      671.0 ns  memory latency at",
        "small pages                         pages=small",
        "fsync                         4 ms  disk",
    ]


def test_a_table_that_folding_cannot_make_narrow_enough_is_not_folded() -> None:
    rows = [["some words that could be folded", *["123456.7"] * 9]]
    header = ["of", *"abcdefghi"]
    assert aligned(header, rows, 80) == aligned(header, rows)


@pytest.mark.parametrize(
    ("y_name", "shown"),
    [("s", "2 ns"), ("bytes_per_s", "3.300 GB/s"), ("busbw", "3.300 GB/s"), ("flop_per_s", "3.300 GFLOP/s")],
)
def test_the_ends_of_a_curve_have_their_unit(y_name: str, shown: str) -> None:
    y = 2e-9 if y_name == "s" else 3.3e9
    curve = Curve(name="rising", of="cache", at={}, x_name="size", y_name=y_name, x=[1.0, 2.0], y=[y, y])
    assert row_of(render.text(job(result=Result(curves=[curve]))), "rising").count(shown) == 2


def test_a_failed_job_says_why_and_shows_what_was_measured() -> None:
    result = Result(timings=[timing("eager", 1e-3)])
    text = render.text(job("failed", result, error={"code": "timed_out", "message": "over 5 s"}))
    assert "failed: timed_out: over 5 s" in text
    assert "1.000" in row_of(text, "eager")


def test_a_queued_job_says_what_it_waits_for() -> None:
    text = render.text(job("queued", waiting_for={"position": 3, "reason": "cpu:0 is busy"}))
    assert "queued, position 3: cpu:0 is busy" in text


def test_names_cannot_steer_a_terminal() -> None:
    text = render.text(job("queued", name="\x1b[2Jgone\nsecond line"))
    assert "\x1b" not in text
    assert "second line" in text.splitlines()[0]


def test_the_csv_is_one_row_for_every_number_and_quotes_what_it_must() -> None:
    rows = list(csv.DictReader(io.StringIO(render.csv(job(result=full_result(), name='a "b", c')))))

    def value(section: str, field: str, **at: str) -> tuple[str, str]:
        (row,) = [
            row
            for row in rows
            if row["section"] == section
            and row["field"] == field
            and all(row[k.replace("__", ".")] == v for k, v in at.items())
        ]
        return row["value"], row["unit"]

    assert value("job", "name") == ('a "b", c', "")
    assert value("timings", "median", of="eager", at__batch_size="8") == ("4e-05", "s")
    assert value("timings", "ci95_low", of="script") == ("1.485e-05", "s")
    assert value("timings", "n", of="script") == ("240", "")
    assert value("curves", "accuracy", of="ddp", at__epoch="2") == ("", "")
    assert value("curves", "ci95_high", of="ddp", at__epoch="1") == ("0.6", "")
    assert value("figures", "value", of="memory") == ("12500000000.0", "B/s")
    assert value("figures", "bytes", of="memory") == (str(1 << 30), "")
    assert value("tables", "op", at__row="0") == ("aten::mm, in place", "")
    assert value("checks", "passed", of="trace") == ("false", "")
    assert value("quality", "evidence.noise_floor") == ("0.031234", "")
    assert value("environment", "torch.threads") == ("2", "")


def test_a_result_with_a_nan_is_shown_as_missing() -> None:
    result = Result(timings=[timing("eager", 1e-3, p90=float("nan")), timing("script", 1e-3)])
    assert "  -  " in row_of(render.text(job(result=result)), "eager")


def test_quantities() -> None:
    assert [number(v) for v in (0, 3.0, 12.3456, 0.0012345, 123456.7, 1e-7, None)] == [
        "0",
        "3",
        "12.35",
        "0.001234",
        "123457",
        "1e-07",
        "-",
    ]
    assert scale([3e-5, 2e-2], "s").unit == "µs"
    assert scale([None, 0.0], "s").unit == "s"
    assert scale([5e-10], "s").unit == "ns"
    assert [quantity(5.1e9, "B/s"), quantity(0.5, "1"), quantity(60000, "samples"), quantity(12, "bytes")] == [
        "5.100 GB/s",
        "0.5000",
        "60000 samples",
        "12 B",
    ]
    assert [error(0.0), error(1.23e-7), error(None)] == ["0", "1.2e-07", "-"]


@given(st.floats(allow_nan=True, allow_infinity=True) | st.none())
def test_any_number_can_be_written(value: float | None) -> None:
    assert number(value)
    assert quantity(value, "s")
    assert quantity(value, "B/s")


@given(st.lists(st.lists(st.text("ab1.-", max_size=5), min_size=2, max_size=2), max_size=5))
def test_columns_line_up(rows: list[list[str]]) -> None:
    lines = aligned(["first", "second"], rows)
    assert len(lines) == len(rows) + 2
    assert all(line == line.rstrip() for line in lines)


def test_rendering_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, torchstone.render; sys.exit(any(n in sys.modules for n in ('torch', 'numpy', 'rich', 'fastapi')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
