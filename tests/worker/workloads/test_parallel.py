"""The `parallel` experiment, run as a worker runs it, on small matrices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.worker.fresh import Outcome, call_fresh, run_fresh
from torchstone import render
from torchstone.ceilings import Ceilings
from torchstone.parallel import ParallelSpec
from torchstone.results import Figure, Result
from torchstone.specs import parse_spec
from worker.bench import Bench, LeasedDevice
from worker.concurrency.reproduce import reproduction
from worker.workloads import parallel

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"kind": "parallel", "size": 64, "repeats": 6, "devices": {"count": 2}, "budget_s": 2.5}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_fresh(SMALL, tmp_path_factory.mktemp("small"))


def figure(result: Result, name: str, of: str) -> Figure:
    found = [f for f in result.figures if (f.name, f.of) == (name, of)]
    assert found, f"no {name} of {of}"
    return found[0]


def extra(row: Figure) -> dict[str, Any]:
    assert row.model_extra is not None
    return row.model_extra


def test_every_way_is_timed_and_compared_with_its_like(small: Outcome) -> None:
    timed = {(t.name, t.of) for t in small.result.timings}
    assert timed == {
        *(("compute", of) for of in ("alone", "sequential", "concurrent", "two_streams", "products")),
        *(("compute", of) for of in ("one_stream", "threads", "fork")),
        ("copy", "shared_memory"),
        *(("both", of) for of in ("serial", "overlapped", "in_order", "by_hand", "by_backend")),
        *(("noise", of + "_again") for of in ("sequential", "serial", "one_stream", "in_order")),
    }
    compared = {(c.of, c.against) for c in small.result.comparisons if c.name != "noise"}
    assert compared == {
        ("concurrent", "sequential"),
        ("two_streams", "alone"),
        ("overlapped", "serial"),
        ("threads", "one_stream"),
        ("fork", "one_stream"),
        ("by_hand", "in_order"),
        ("by_backend", "in_order"),
    }
    assert [t.at["rank"] for t in small.result.timings if t.of == "alone"] == [0, 1]


def test_everything_was_compared_in_every_run(small: Outcome) -> None:
    assert small.result.checks and all(check.passed for check in small.result.checks)
    runs = {t.of: t.n for t in small.result.timings}
    for name, of, each in (
        ("copied_whole", "overlapped", 6),
        ("copied_whole", "shared_memory", 6),
        ("computed_whole", "concurrent", 2 * 6),
        ("equal_to_whole_batch", "by_hand", 2 * 2),
        ("equal_to_whole_batch", "by_backend", 2 * 2),
    ):
        [check] = [c for c in small.result.checks if (c.name, c.of) == (name, of)]
        assert check.detail is not None and int(check.detail.split()[0]) >= each * runs[of], (name, of)
    right = {c.of for c in small.result.checks if c.name == "equal_to_float64"}
    assert right == {"cpu:0", "cpu:1", "products"}


def test_figures_recompute_from_the_samples(small: Outcome) -> None:
    with np.load(small.kept["samples.npz"]) as archive:
        median = {
            key: float(np.median(archive[key])) for key in archive.files if key.endswith(("/concurrency", "/overlap"))
        }
    alone_s = min(median["alone/0/concurrency"], median["alone/1/concurrency"])
    efficiency = figure(small.result, "scaling_efficiency", "concurrent")
    assert efficiency.value == pytest.approx(alone_s / median["concurrent/concurrency"])
    assert efficiency.at == {"devices": 2}
    compute_s, copy_s, both_s = (median[f"{lane}/overlap"] for lane in ("compute", "copy", "overlapped"))
    hidden = figure(small.result, "host_copy_overlap", "overlapped")
    assert extra(hidden)["raw"] == pytest.approx((compute_s + copy_s - both_s) / min(compute_s, copy_s))
    assert (hidden.value is None) != (hidden.reason is None)
    assert hidden.value in (None, min(1.0, extra(hidden)["raw"]))
    assert extra(hidden)["bound_s"] == pytest.approx(max(compute_s, copy_s))


def test_one_and_two_devices_are_a_curve(small: Outcome) -> None:
    curves = {curve.name: curve for curve in small.result.curves}
    assert {(c.of, c.x_name, *c.x) for c in curves.values()} == {("concurrent", "devices", 1.0, 2.0)}
    one, both = curves["speedup"].y
    efficiency = figure(small.result, "scaling_efficiency", "concurrent").value
    assert one == 1 and efficiency is not None and both == pytest.approx(2 * efficiency)
    told = extra(figure(small.result, "scaling_efficiency", "concurrent"))["ci95"]
    assert curves["speedup"].ci95 == [None, told and pytest.approx((2 * told[0], 2 * told[1]))]
    alone = [f.value for f in small.result.figures if (f.name, f.of) == ("compute_rate", "alone")]
    together = figure(small.result, "compute_rate", "concurrent").value
    assert curves["compute_rate"].y == pytest.approx([max(rate for rate in alone if rate), together])


def _with_ceilings(spec: dict[str, Any], folder: Path) -> str:
    """On three devices that share this machine's cores, and a host whose every rate is known to be one a second."""
    parsed = parse_spec(spec)
    assert isinstance(parsed, ParallelSpec)
    bench = Bench.local(folder, devices=parsed.devices.count)
    rows: list[dict[str, Any]] = []
    for cores in range(1, 1 + len(os.sched_getaffinity(0))):
        gemm = {"cores": cores, "dtype": parsed.dtype, "device_type": "cpu"}
        rows.append({"of": "gemm", "name": "gemm", "at": gemm, "unit": "FLOP/s"})
        rows.append({"of": "memory", "name": "stream_triad", "at": {"cores": cores}, "unit": "B/s"})
    document = {"ceilings": [{**row, "value": 1.0, "job": "j", "grade": "valid"} for row in rows]}
    bench.ceilings = Ceilings(document)
    return parallel.run(parsed, bench).to_json()


def test_of_three_devices_two_at_once_are_measured_too_and_set_against_the_ceilings(tmp_path: Path) -> None:
    spec = {**SMALL, "devices": {"count": 3}, "parts": ["concurrency"], "budget_s": 1.5}
    result = Result.model_validate_json(call_fresh(_with_ceilings, spec, tmp_path))
    timed = [(t.of, t.at["devices"]) for t in result.timings if t.of in ("alone", "concurrent")]
    assert timed == [("alone", 1)] * 3 + [("concurrent", 2), ("concurrent", 3)]
    best_s = min(t.median for t in result.timings if t.of == "alone" and t.median)
    seconds = {t.at["devices"]: t.median for t in result.timings if t.of == "concurrent" and t.median}
    by_name = {curve.name: curve for curve in result.curves}
    assert by_name["speedup"].x == [1, 2, 3]
    assert by_name["speedup"].y == pytest.approx([1, *(count * best_s / seconds[count] for count in (2, 3))])
    flop = 2 * SMALL["size"] ** 3 * SMALL["repeats"]
    assert by_name["compute_rate"].y[1:] == pytest.approx([count * flop / seconds[count] for count in (2, 3)])
    efficiencies = {f.at["devices"]: f.value for f in result.figures if f.name == "scaling_efficiency"}
    assert efficiencies == {count: pytest.approx(best_s / seconds[count]) for count in (2, 3)}
    ranks = {count: {s.at["rank"] for s in result.spans if s.at["devices"] == count} for count in (2, 3)}
    assert ranks == {2: {0, 1}, 3: {0, 1, 2}}
    checked = {c.at["devices"]: c.passed for c in result.checks if (c.name, c.of) == ("computed_whole", "concurrent")}
    assert checked == {2: True, 3: True}
    points = [f for f in result.figures if f.name == "roofline"]
    assert len(points) == 3 + 1 + 2 + 1 and all(f.value is not None and f.value > 0 for f in points)
    assert all(extra(f)["ceiling_flop_per_s"] == 1.0 for f in points)


def test_on_cpu_devices_overlap_is_null_with_a_reason(small: Outcome) -> None:
    rows = [f for f in small.result.figures if f.name == "overlap"]
    assert {row.at["direction"] for row in rows} == {"device_to_host", "host_to_device"}
    assert all(row.value is None and "host_copy_overlap" in str(row.reason) for row in rows)


def test_all_but_the_schedule_are_set_against_the_ceilings_of_which_there_are_none_here(small: Outcome) -> None:
    found = {(f.name, f.of): f for f in small.result.figures if f.name in ("roofline", "memory_fraction")}
    timed = {t.of for t in small.result.timings if t.name != "noise" and not t.of.startswith(("by_", "in_order"))}
    assert {of for _, of in found} == timed and ("memory_fraction", "shared_memory") in found
    assert all(f.value is None and "no hardware report" in str(f.reason) for f in found.values())
    rate = figure(small.result, "compute_rate", "concurrent").value
    assert extra(found["roofline", "concurrent"])["flop_per_s"] == pytest.approx(rate)


def test_the_timeline_keeps_what_must_wait_apart(small: Outcome) -> None:
    spans = small.result.spans
    assert {s.at["part"] for s in spans} == {"concurrency", "overlap", "schedule"}
    made = [s for s in spans if (s.name, s.of) == ("compute", "overlapped")]
    copied = [s for s in spans if (s.name, s.of) == ("copy", "overlapped")]
    assert len(made) == len(copied) == 6
    assert all(copy.start_s >= product.end_s for product, copy in zip(made, copied, strict=True))
    step = {(s.name, s.at.get("rank", "host")): s for s in spans if s.of == "by_hand"}
    for layer in (2, 1):
        update = step[f"update {layer}", "host"]
        assert all(step[f"push {layer}", rank].end_s <= update.start_s for rank in (0, 1))
        assert all(step[f"pull {layer}", rank].start_s >= update.end_s for rank in (0, 1))
    backend = {(s.name, s.at["rank"]): s for s in spans if s.of == "by_backend"}
    assert {name for name, _ in backend} == {"forward", "backward", "reduce 2", "reduce 1", "update"}
    assert all(backend["reduce 2", rank].start_s < backend["backward", rank].end_s for rank in (0, 1))


def test_the_table_has_all_of_it(small: Outcome) -> None:
    result = json.loads(small.result.to_json())
    text = render.text({"kind": "parallel", "id": "x", "state": "succeeded", "spec": SMALL, "result": result})
    for words in ("scaling_efficiency", "host_copy_overlap", "by_backend", "quality:", "first start", "has no engine"):
        assert words in text, words
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles[1:6] == [
        "concurrency: compute",
        "overlap: compute",
        "overlap: copy",
        "overlap: both",
        "streams: compute",
    ]
    sections = {section.partition("\n")[0]: section for section in text.split("\n\n")}
    assert "FLOP/s" in sections["curves"] and "2 by devices" in sections["curves"]
    assert "work" not in sections["concurrency: compute"] and "rank" not in sections["streams: compute"]
    assert all(f"{part:11}" in sections["noise"] for part in ("concurrency", "overlap", "streams", "schedule"))


def test_a_short_budget_cuts_repeats_and_says_so(tmp_path: Path) -> None:
    spec = {**SMALL, "size": 512, "repeats": 500, "parts": ["concurrency"], "budget_s": 1.5}
    result = run_fresh(spec, tmp_path).result
    [code] = [c for c in result.quality.codes if c.code == "repeats_cut_short"]
    assert code.evidence["asked"] == 500 and 1 <= code.evidence["timed"] < 100
    assert result.quality.grade != "valid"


def test_more_threads_than_cores_are_told(tmp_path: Path) -> None:
    spec = {**SMALL, "parts": ["concurrency"], "budget_s": 1e-3, "threads": 64}
    result = run_fresh(spec, tmp_path).result
    [code] = [c for c in result.quality.codes if c.code == "oversubscribed"]
    assert code.evidence["threads"] == 64


def test_overlap_and_streams_run_on_one_device(tmp_path: Path) -> None:
    spec = {**SMALL, "parts": ["overlap", "streams"], "devices": {"count": 1}, "budget_s": 1}
    result = run_fresh(spec, tmp_path).result
    shared = figure(result, "host_copy_overlap", "overlapped")
    assert shared.value is None and "share the cores of cpu:0" in str(shared.reason)
    assert {t.at["work"] for t in result.timings if t.of == "fork"} == {"small", "large"}


def run_script(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )


def test_reproduce_runs_by_itself(small: Outcome, tmp_path: Path) -> None:
    done = run_script(small.kept["reproduce.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    told = {line[:24].rstrip(): line[24:].split() for line in done.stdout.splitlines()}
    assert all(float(seconds) > 0 and unit == "s" for seconds, unit in told.values())
    assert list(told) == [
        *("device 0 alone", "device 1 alone", "one after another", "all at once"),
        *("compute, then copy", "copy while computing"),
        *(f"{work}, {way}" for work in ("small", "large") for way in ("one stream", "threads", "fork")),
        *("step, in order", "step, by hand", "step, by the backend"),
    ]
    assert "torchstone" not in small.kept["reproduce.py"].read_text().replace("a Torchstone job", "")


def reproduced(tmp_path: Path, devices: int, *was_and_is: tuple[str, str], **spec: Any) -> Any:
    """Run the script of a job with a few words changed."""
    parsed = parse_spec({**SMALL, "devices": {"count": devices}, **spec})
    assert isinstance(parsed, ParallelSpec)
    text = reproduction(parsed, 1, devices, is_cuda=False)
    for was, now in was_and_is:
        assert text.count(was) == 1
        text = text.replace(was, now)
    (script := tmp_path / "changed.py").write_text(text)
    return run_script(script, tmp_path)


@pytest.mark.parametrize(
    ("devices", "parts", "ways"),
    [(1, ["overlap"], ["compute", "copy"]), (3, ["concurrency"], ["device"] * 3 + ["2 at once", "one", "all"])],
)
def test_reproduce_has_the_parts_that_were_asked_for(
    devices: int, parts: list[str], ways: list[str], tmp_path: Path
) -> None:
    done = reproduced(tmp_path, devices, parts=parts, dtype="float64")
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(ways) and all(line.startswith(way) for line, way in zip(lines, ways, strict=True))


@pytest.mark.parametrize(
    ("part", "was", "now", "said"),
    [
        ("schedule", "for up in ups if word", "for up in () if word", "a device has other weights"),
        ("streams", "list(pool.map(", "(pool.map(", "a result was read before it was there"),
    ],
)
def test_reproduce_fails_where_a_result_is_read_too_early(
    part: str, was: str, now: str, said: str, tmp_path: Path
) -> None:
    done = reproduced(tmp_path, 2, (was, now), parts=[part], size=512)
    assert done.returncode != 0 and said in done.stderr


def _on_gpu(spec: dict[str, Any], folder: Path) -> str:
    parsed = parse_spec(spec)
    assert isinstance(parsed, ParallelSpec)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    devices = [LeasedDevice(f"cuda:{rank}", "cuda", cores) for rank in range(parsed.devices.count)]
    return parallel.run(parsed, Bench("local", 1, "localhost", devices, folder)).to_json()


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [["overlap", "streams"]])
def test_on_one_gpu(parts: list[str], tmp_path: Path) -> None:
    spec = {**SMALL, "size": 1024, "parts": parts, "devices": {"type": "cuda", "count": 1}, "budget_s": 10}
    result = Result.model_validate_json(call_fresh(_on_gpu, spec, tmp_path))
    rows = {(f.of, f.at["direction"]): f.value for f in result.figures if f.name == "overlap"}
    assert set(rows) == {
        (of, direction) for of in ("pageable", "pinned") for direction in ("device_to_host", "host_to_device")
    }
    assert all(check.passed for check in result.checks)
    assert all(value is not None and value <= 1 for value in rows.values())
