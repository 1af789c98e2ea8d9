"""What each part is made of, on small sizes: known results, the formulas, and contestants that cheat."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.fresh import call_fresh
from torchstone.asynchrony import AsyncSpec, Part
from torchstone.results import Result
from torchstone.specs import parse_spec
from worker.asynchrony import barriers, dispatch, feeding, numpy_vs_torch
from worker.asynchrony.chain import Chain, after, exactly, first_matrix, shift_matrix
from worker.asynchrony.contest import Contest, Point
from worker.asynchrony.reproduce import reproduction
from worker.asynchrony.stage import Stage, share_hidden
from worker.asynchrony.streams import Stream, ThroughThread
from worker.bench import Bench, LeasedDevice
from worker.measure.race import Record
from worker.measure.resting import Resting
from worker.measure.statistics import FEWEST_ROUNDS, TOO_FEW
from worker.workloads.async_ import PARTS

CPU = torch.device("cpu")
SMALL = {"size": 24, "repeats": 3, "budget_s": 0.6}


def spec_of(**fields: Any) -> AsyncSpec:
    spec = parse_spec({"kind": "async", **SMALL, **fields})
    assert isinstance(spec, AsyncSpec)
    return spec


# Known results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5, 32])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_exact_result_of_a_stream_is_known(size: int, dtype: str) -> None:
    start, shift = first_matrix(size, dtype, seed=3), shift_matrix(size, dtype)
    x = start
    for steps in range(4):
        assert (x == after(start, steps)).all() and x.dtype == dtype
        x = shift @ x


def test_one_product_too_few_or_a_lost_number_is_seen() -> None:
    chain = Chain(16, torch.float32, CPU, seed=0)
    for _ in range(5):
        chain.step()
    assert chain.check()["bitwise"]
    chain.steps += 1
    assert not chain.check()["passed"]
    chain.steps -= 1
    chain.x[3, 3] = math.nan
    told = chain.check()
    assert not told["passed"] and told["nan_count"] == 1
    assert "shape" in exactly(np.zeros(2), np.zeros(3))["detail"]


def test_normal_numbers_are_told_from_others() -> None:
    random = np.random.default_rng(0)
    assert numpy_vs_torch.looks_normal(random.standard_normal((200, 200)))["passed"]
    others = {
        "mean": random.standard_normal((200, 200)) + 0.1,
        "variance": 1.1 * random.standard_normal((200, 200)),
        "fourth moment": random.uniform(-(3**0.5), 3**0.5, (200, 200)),
        "lag-1 product": np.repeat(random.standard_normal((200, 100)), 2, axis=1),
        "nan": np.full((4, 4), np.nan),
    }
    for what, numbers in others.items():
        told = numpy_vs_torch.looks_normal(numbers)
        assert not told["passed"] and (what in told["detail"] or told["nan_count"]), what


def test_sizes_double_up_to_the_one_asked_for() -> None:
    assert dispatch.sizes_up_to(1000) == [1, 4, 16, 32, 64, 128, 256, 512, 1000]
    assert dispatch.sizes_up_to(1) == [1]
    assert dispatch.sizes_up_to(40) == [1, 4, 16, 40]
    assert dispatch.sizes_up_to(4000)[-2:] == [2048, 4000]


def test_the_launch_bound_size_lies_where_work_equals_the_cost_of_a_call() -> None:
    sizes = [1, 16, 64, 256]
    bound, _ = dispatch.launch_bound_below(sizes, [1.0, 1.5, 4.0, 40.0], None)
    assert bound == pytest.approx(16 * 4 ** (math.log(4 / 3) / math.log(8 / 3)))
    assert dispatch.launch_bound_below(sizes, [1.0, 1.1, 1.2, 1.3], None)[0] is None
    # With the device's own clock: half of the time is the device's from 64 on.
    assert dispatch.launch_bound_below(sizes, [1.0] * 4, [0.1, 0.2, 0.5, 1.0])[0] == pytest.approx(64)


def test_the_overlap_is_the_hidden_share_of_the_shorter_half() -> None:
    record = Record(seconds={name: np.full(8, t) for name, t in (("draw", 2.0), ("multiply", 3.0), ("fed", 3.5))})
    value, interval = feeding.overlap(record)
    assert value == pytest.approx(0.75) and interval == pytest.approx([0.75, 0.75])
    record.seconds["fed"] = np.full(8, 1.0)
    assert feeding.overlap(record)[0] == 1.0, "more than all of it cannot be hidden"


# What is asynchronous, and what is not ---------------------------------------------------------------------------


def test_a_cpu_device_has_the_result_when_the_call_returns() -> None:
    told = Stream([1, 64], torch.float32, CPU, seed=0).arrival("64", trials=8)
    assert told["looks"] == 1 and told["right"]


def test_a_result_that_is_not_there_yet_is_waited_for_and_told() -> None:
    """An operation that another thread does: the call returns before its output is there."""
    stream = ThroughThread([512], torch.float32, CPU, seed=0, threads=1)
    chain = stream.chains["512"]
    step, late = chain.step, stream.operations

    def hand_over() -> None:
        late.put(step)

    chain.step = hand_over  # type: ignore[method-assign]
    told = stream.arrival("512", trials=1)
    assert told["looks"] > 1
    assert all(back < there for back, there in zip(told["returned_s"], told["arrived_s"], strict=True))


def test_a_worker_threads_stream_is_complete_when_it_was_waited_for() -> None:
    stream = ThroughThread([32], torch.float32, CPU, seed=0, threads=1)
    for _ in range(3):
        done_s, returned_s = stream.turn("32", calls=50, settle_s=0.0, call_s=1e-5)
        assert returned_s < done_s
        told = stream.check("32")
        assert told["passed"] and stream.chains["32"].steps in (51, 102, 153), told


def test_a_worker_threads_error_reaches_whoever_waits() -> None:
    stream = ThroughThread([4], torch.float32, CPU, seed=0, threads=1)
    stream.operations.put(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()


# The parts, each by itself ---------------------------------------------------------------------------------------


def _measured(folder: Path, fields: dict[str, Any], devices: list[LeasedDevice] | None) -> str:
    bench = Bench.local(folder)
    if devices:
        bench.devices = devices
    spec = spec_of(**fields)
    stage = Stage(spec, bench, Result())
    for part in spec.parts:
        PARTS[part](stage)
    stage.result.tables.append(stage.findings())
    stage.result.environment["codes"] = [code.model_dump() for code in stage.codes]
    return stage.result.to_json()


def measured(folder: Path, devices: list[LeasedDevice] | None = None, **fields: Any) -> Result:
    return Result.model_validate_json(call_fresh(_measured, folder, fields, devices))


def findings(result: Result) -> str:
    (table,) = [table for table in result.tables if table.name == "findings"]
    return "\n".join(row[1] for row in table.rows)


def test_numpy_and_torch_do_equal_work_and_the_books_comparison_gets_no_ratio(tmp_path: Path) -> None:
    result = measured(tmp_path, parts=["numpy_vs_torch"], threads=1)
    assert {(t.of, t.at["work"]) for t in result.timings if t.name == "numpy_vs_torch"} == {
        (of, work) for of in ("numpy", "torch") for work in ("product", "random", "random_and_product")
    }
    checks = {(c.name, c.of, c.at["work"], c.at["when"]): c.passed for c in result.checks}
    for when in ("before the race", "after the race"):
        assert checks["equal_to_numpy", "torch", "product", when]
        for of in ("numpy", "torch"):
            assert checks["equal_to_float64", of, "random_and_product", when]
            assert ("standard_normal", of, "random", when) in checks
    (book,) = [c for c in result.comparisons if c.name == "book_loop"]
    assert book.verdict == "withheld" and book.speedup is None and "float64 against float32" in (book.reason or "")
    assert {f.of for f in result.figures if f.name == "book_loop"} == {"numpy", "torch", "torch, synchronised"}
    rooflines = [f for f in result.figures if f.name == "roofline"]
    assert {f.of for f in rooflines} == {"numpy", "torch"} and all(f.reason for f in rooflines), "no ceilings are known"
    (table,) = [table for table in result.tables if "not one of equals" in table.name]
    assert "float64" in table.rows[0][-1] and "without waiting" in table.rows[1][-1]
    assert all(pool["num_threads"] == 1 for pool in result.environment["hosts"][0]["numpy_blas"])
    assert not [c for c in result.environment["codes"] if c["code"] == "mode_mismatch"]


def test_a_cpu_device_is_called_synchronous_with_its_evidence(tmp_path: Path) -> None:
    cores = Bench.local(tmp_path).cores
    two = [LeasedDevice(f"cpu:{i}", "cpu", cores[i::2] or cores) for i in range(2)]
    result = measured(tmp_path, two, parts=["dispatch"])
    lanes = {"cpu:0", "cpu:1", "worker_thread"}
    for name in ("dispatch", "completion", "launch_bound_below"):
        assert {f.of for f in result.figures if f.name == name} == lanes
    depths = [f for f in result.figures if f.name == "queue_depth"]
    assert {f.of for f in depths} == {"cpu:0", "cpu:1"}
    assert all(f.value is None and "synchronous" in (f.reason or "") for f in depths)
    looks = [f for f in result.figures if f.name == "returned_share" and f.of != "worker_thread"]
    assert all("read 1 time(s)" in (f.model_extra or {})["method"] for f in looks)
    assert {(c.of, c.at["time"]) for c in result.curves} == {
        (lane, time) for lane in lanes for time in ("dispatch", "completion")
    }
    timed = {(t.of, t.name, t.at["size"]): t.ci95 for t in result.timings if "size" in t.at}
    for curve in result.curves:
        assert curve.ci95 == [timed.get((curve.of, curve.at["time"], int(x or 0))) for x in curve.x]
    assert all(c.bitwise for c in result.checks if c.name == "exact")
    fed = {(s.of, s.at["thread"]) for s in result.spans if s.at["part"] == "feeding"}
    assert fed == {("serial", "main"), ("fed", "main"), ("fed", "feeder")}
    assert len([s for s in result.spans if s.of == "fed"]) == 2 * SMALL["repeats"]
    assert "synchronous" in findings(result)


def test_every_barrier_reads_the_right_numbers_and_has_its_cost(tmp_path: Path) -> None:
    result = measured(tmp_path, parts=["barriers"])
    costs = {f.of: f for f in result.figures if f.name == "barrier"}
    assert set(costs) == set(barriers.BARRIERS) - {"no_barrier"}
    assert all(check.passed and check.bitwise for check in result.checks)
    printed, nothing = costs["print"].value, costs["synchronize"].value
    assert printed is not None and nothing is not None and printed > nothing
    assert "no barrier waits for anything" in findings(result)


def test_every_form_gives_the_graphs_exact_result(tmp_path: Path) -> None:
    result = measured(tmp_path, parts=["graph"])
    lanes = {"one_thread", "script", "intra_op", "jit_fork", "python_threads"}
    found = {(c.of, c.at["graph"], c.at["when"]) for c in result.checks if c.passed and c.bitwise}
    assert found == {
        (lane, kind, when)
        for lane in lanes
        for kind in ("chapter", "independent", "dependent")
        for when in ("before the race", "after the race")
    }
    overlaps = {(f.of, f.at["graph"]): f for f in result.figures if f.name == "overlap"}
    assert set(overlaps) == {(of, k) for of in ("jit_fork", "python_threads") for k in ("independent", "dependent")}
    assert all(
        f.value is None and "nothing to overlap" in (f.reason or "")
        for (_, k), f in overlaps.items()
        if k == "dependent"
    )
    efficient = {f.of for f in result.figures if f.name == "scaling_efficiency" and f.at["graph"] == "independent"}
    assert efficient == {"intra_op", "jit_fork", "python_threads"}
    assert {s.of for s in result.spans} == lanes
    assert all(0 <= s.start_s <= s.end_s for s in result.spans)
    independent = {t.of: t for t in result.timings if t.name == "graph" and t.at.get("graph") == "independent"}
    for of, timing in independent.items():  # the timeline is of a run like those that were timed
        took_s = max(s.end_s for s in result.spans if s.of == of)
        assert timing.median and took_s < 5 * timing.median, of


def test_with_too_few_rounds_no_share_and_no_ratio_is_told(tmp_path: Path) -> None:
    cores = Bench.local(tmp_path).cores
    two = [LeasedDevice(f"cpu:{i}", "cpu", (cores[i % len(cores)],)) for i in range(2)]
    fields = {"parts": ["numpy_vs_torch", "dispatch", "graph"], "budget_s": 1e-3}
    result = measured(tmp_path, two, **fields)
    assert all(t.n < FEWEST_ROUNDS for t in result.timings)
    told = [f for f in result.figures if f.name in ("overlap", "scaling_efficiency")]
    assert {f.of for f in told} >= {"fed", "jit_fork", "python_threads"} and all(f.value is None for f in told)
    if len(cores) > 1:
        assert {f.name for f in told if f.reason == TOO_FEW} == {"overlap", "scaling_efficiency"}
    assert f"jit_fork against script: {TOO_FEW}" in findings(result)
    assert not re.search(r"hidden\b(?<!what of it is hidden)|\dx, |\dx of ", findings(result))


def test_one_core_has_no_overlap_and_says_why(tmp_path: Path) -> None:
    core = Bench.local(tmp_path).cores[:1]
    result = measured(tmp_path, [LeasedDevice("cpu:0", "cpu", core)], parts=["dispatch", "graph"], budget_s=0.3)
    overlaps = [f for f in result.figures if f.name == "overlap"]
    assert overlaps and all(f.value is None and f.reason for f in overlaps)
    assert [f for f in overlaps if "one core" in (f.reason or "")]


def _cheated(folder: Path) -> str:
    """A race in which one contestant skips every product and another reads a number that is not there yet."""
    stage = Stage(spec_of(parts=["barriers"]), Bench.local(folder), Result())

    class Idle(barriers.Reader):
        def _step(self, key: str, chain: Chain) -> Any:
            def step() -> None:
                chain.steps += 1
                self.read[key] = float(chain.start[0, 0])

            return step

    with Contest(stage, "barriers", "no_barrier", 0.3) as contest:
        contest.start("no_barrier", lambda: barriers.Reader("no_barrier", [24], stage))
        contest.start("item", lambda: Idle("item", [24], stage))
        points = [Point("24", {"size": 24})]
        contest.race(points)
        contest.judge(barriers._check_all(stage, contest, points))
    return stage.result.to_json()


def test_work_that_was_not_done_gets_no_speed_up(tmp_path: Path) -> None:
    result = Result.model_validate_json(call_fresh(_cheated, tmp_path))
    (row,) = [c for c in result.comparisons if c.of == "item"]
    assert row.verdict == "withheld" and row.speedup is None and row.reason


def _with_a_death(folder: Path, part: str, who: str, key: str) -> str:
    """A part whose contestant `who` dies when it is to be timed at `key`."""
    timed = Resting.turn

    def turn(self: Any, **arguments: Any) -> Any:
        if (getattr(self, "lane", None) or getattr(self, "barrier", None)) == who and arguments["key"] == key:
            os.kill(os.getpid(), signal.SIGKILL)
        return timed(self, **arguments)

    Resting.turn = turn  # type: ignore[method-assign]
    return _measured(folder, {"parts": [part], "size": 40}, None)


def test_the_death_of_an_alternative_leaves_what_is_known_of_feeding(tmp_path: Path) -> None:
    text = call_fresh(_with_a_death, tmp_path, "dispatch", "all_threads", "feeding/40")
    result = Result.model_validate_json(text)
    assert [row.of for row in result.skipped] == ["all_threads"]
    assert {t.of for t in result.timings if t.name == "feeding"} == {"serial", "fed", "draw", "multiply"}
    assert "drawing" in findings(result) and "inside each product" not in findings(result)


def test_a_contestant_that_dies_before_it_was_checked_gets_no_speed_up(tmp_path: Path) -> None:
    result = Result.model_validate_json(call_fresh(_with_a_death, tmp_path, "barriers", "item", "barriers/40"))
    assert [row.of for row in result.skipped] == ["item"]
    (row,) = [c for c in result.comparisons if c.of == "item"]
    assert row.verdict == "withheld" and row.speedup is None and "failed before" in (row.reason or "")
    assert "item" not in {f.of for f in result.figures if f.name == "barrier"}


def test_a_share_is_told_as_a_number_only_where_its_interval_lies_above_zero() -> None:
    assert share_hidden(0.61, [0.2, 0.9]) == "61 %"
    assert share_hidden(0.12, [-0.5, 0.6]) == "nothing that shows"
    assert share_hidden(0.12, None) == "nothing that shows"
    assert share_hidden(-0.12, [-0.5, 0.2]) == "nothing"


def test_reproduce_repeats_every_part_without_torchstone(tmp_path: Path) -> None:
    spec = spec_of(name='a "job"', parts=["barriers", "dispatch", "graph", "numpy_vs_torch"])
    script = tmp_path / "reproduce.py"
    text = reproduction(spec, threads=1, device="cpu", branches=2, sizes=[1, 24])
    script.write_text(
        text.replace("budget_s=1.0", "budget_s=0.02").replace(", 0.3)", ", 0.02)").replace(", 0.5)", ", 0.02)")
    )
    run = subprocess.run([sys.executable, "-I", script.name], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for word in ("== barriers", "[[3.0, 3.0]]", "jit_fork", "numpy_copy", "not waited for", "size 24"):
        assert word in run.stdout, run.stdout
    assert "torchstone" not in text and "import worker" not in text


# On a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_returns_early_and_queues(tmp_path: Path) -> None:
    from worker.devices import _cuda_devices

    device = _cuda_devices([0])[0]
    cores = Bench.local(tmp_path).cores
    leased = [LeasedDevice(device.name, "cuda", cores, device.uuid)]
    result = measured(tmp_path, leased, parts=[part.value for part in Part], size=1024, budget_s=20)
    depth = next(f for f in result.figures if f.name == "queue_depth")
    assert depth.value is None or depth.value > 100
    share = next(f for f in result.figures if f.name == "returned_share" and f.at["size"] == 1024)
    assert share.value is not None and share.value < 0.9
    assert all(check.passed for check in result.checks)
