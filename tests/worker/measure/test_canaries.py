"""Canaries of the stopwatch: faults put in on purpose, each of which it must find. No torch operation is faked."""

from __future__ import annotations

import math
import os
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.worker.fresh import call_fresh
from torchstone.errors import ProcessDied
from torchstone.results import Result
from torchstone.specs import JitSpec, Variant, parse_spec
from worker.bench import Bench
from worker.contestants import torchscript
from worker.contestants.table import WAYS
from worker.contestants.ways import Inputs, Runnable, Setting, Way, as_it_is
from worker.measure.contestant import Contestant, ContestantFailed
from worker.measure.race import Lane, Plan, race
from worker.measure.rows import judge
from worker.measure.stopwatch import Stopwatch
from worker.workloads.jit import Experiment


def spin(seconds: float) -> None:
    """Keep the core busy for a while: what a computation of known length looks like."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Spinner(Stopwatch):
    """Contestants whose calls take a known time."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.calls["p"] = call


def race_calls(calls: dict[str, Callable[[], object]], plan: Plan) -> dict[str, Any]:
    """Race calls by name, the first of them the baseline, the second its twin; verdicts and more."""
    contestants = [Contestant.start(name, partial(Spinner, call), (0,), 1) for name, call in calls.items()]
    try:
        record = race(contestants, "p", plan)
    finally:
        for contestant in contestants:
            contestant.close()
    found = judge(record, plan, {}, "p", {}, {name: {"build_s": 0.0} for name in calls})
    return {
        "verdicts": {c.of: c.verdict for c in found.comparisons},
        "record": record,
        "codes": [c.code for c in found.codes],
    }


def test_a_delay_of_five_percent_is_found() -> None:
    calls = {name: partial(spin, 400e-6 * factor) for name, factor in {"a": 1, "a_again": 1, "late": 1.05}.items()}
    found = call_fresh(race_calls, calls, Plan("a", 0.01, 15.0))
    assert found["verdicts"]["late"] == "slower", found
    assert found["verdicts"]["a_again"] in ("same", "inconclusive")


def test_a_drift_over_the_whole_race_hits_all_alike() -> None:
    found = call_fresh(race_calls, {"a": drifting, "a_again": drifting, "b": drifting}, Plan("a", 0.005, 1.5))
    assert found["verdicts"]["b"] in ("same", "inconclusive")


def drifting() -> None:
    """Takes 200 us now and twice that a few seconds later, whoever calls it."""
    spin(200e-6 * (1 + (time.monotonic() % 4) / 4))


def test_a_race_stops_when_it_is_sharp_and_not_before_a_look() -> None:
    calls = {name: partial(spin, 300e-6) for name in ("a", "a_again", "b")}
    record = call_fresh(race_calls, calls, Plan("a", 0.2, 20.0))["record"]
    assert record.stopped_by == "precision"
    assert math.log2(record.rounds / 30).is_integer()


def test_a_budget_is_kept_within_ten_percent() -> None:
    calls = {name: partial(spin, 5e-3) for name in ("a", "a_again", "b")}
    record = call_fresh(race_calls, calls, Plan("a", 1e-6, 1.0))["record"]
    assert record.stopped_by == "budget"
    assert 0.8 <= record.spent_s <= 1.1


def test_the_slow_first_calls_are_kept_apart() -> None:
    calls = {name: Warming() for name in ("a", "a_again", "b")}
    record = call_fresh(race_calls, calls, Plan("a", 0.05, 1.0))["record"]
    for name in calls:
        assert record.first_call_s[name] > 5 * np.median(record.seconds[name])
        assert record.warm_up[name].max() > 2 * np.median(record.seconds[name])


class Warming:
    """Takes 20 ms at first, 2 ms for five calls, then 200 us."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        spin(20e-3 if self.calls == 1 else 2e-3 if self.calls <= 6 else 200e-6)


def test_a_contestant_that_dies_is_named_and_the_others_finish() -> None:
    calls = {"a": partial(spin, 1e-3), "a_again": partial(spin, 1e-3), "mortal": Mortal()}
    record = call_fresh(race_calls, calls, Plan("a", 0.01, 3.0))["record"]
    assert record.failed["mortal"].kind == "died"
    assert "SIGSEGV" in record.failed["mortal"].reason
    assert len(record.seconds["a"]) > 5
    assert "mortal" not in record.seconds


class Mortal:
    """Reads address zero on its 40th call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        spin(1e-3)
        if self.calls == 40:
            import ctypes
            import faulthandler

            faulthandler.disable()
            ctypes.string_at(0)


def test_the_baselines_death_ends_the_race() -> None:
    calls: dict[str, Callable[[], object]] = {"a": Mortal(), "a_again": partial(spin, 1e-3)}
    with pytest.raises(ContestantFailed, match="a: its process was killed by SIGSEGV"):
        call_fresh(race_calls, calls, Plan("a", 0.001, 5.0))


def test_a_forgotten_synchronisation_shows_as_calls_that_return_before_they_are_done() -> None:
    done_s, returned_s = call_fresh(time_a_queue)
    assert returned_s < 0.2 * done_s


def time_a_queue() -> list[float]:
    """A device that works behind its caller's back, as a thread: the clock must wait for it at both ends."""
    from concurrent.futures import ThreadPoolExecutor, wait

    queue = ThreadPoolExecutor(1)
    pending: list[Any] = []
    watch = Stopwatch(synchronize=lambda: (wait(pending), pending.clear())[-1])
    watch.calls["p"] = lambda: pending.append(queue.submit(time.sleep, 2e-3))
    return watch.turn("p", calls=10, settle_s=0.0, call_s=2e-3)


@pytest.mark.slow
def test_identical_contestants_are_seldom_called_different() -> None:
    cries = sum(call_fresh(count_false_alarms, 20) for _ in range(2))
    assert cries <= 4  # of 40


def count_false_alarms(trials: int) -> int:
    cries = 0
    for trial in range(trials):
        calls = {name: partial(spin, 100e-6) for name in ("a", "a_again", "b")}
        found = race_calls(calls, Plan("a", 0.01, 0.4, seed=trial))
        cries += found["verdicts"]["b"] in ("faster", "slower")
    return cries


class Branching(nn.Module):
    """Does another thing for a negative sum: a trace records one of the two."""

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x * 2
        return x - 1


class Unbinding(nn.Module):
    """Works row by row: a trace unrolls the rows that it saw."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 for row in x.unbind(0)])


def off_by_a_little(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """Right but for 1 %: fast and wrong."""
    return lambda x: model(x) * 1.01


def save_without_weights(scripted: Any, path: Path) -> None:
    """Writes a file that loads and runs, and computes something else."""
    with torch.no_grad():
        for parameter in scripted.parameters():
            parameter.zero_()
    torchscript.save(scripted, path)


def remember(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """Computes once for each tensor that it is handed, and holds on to it."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def call(x: Tensor) -> Tensor:
        if id(x) not in seen:
            seen[id(x)] = (x, model(x))
        return seen[id(x)][1]

    return call


def die_of_three_rows(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """Takes any batch but one of three, which nobody times."""
    return lambda x: model(x) if len(x) != 3 else os.kill(os.getpid(), signal.SIGKILL)


class DieLate:
    """Goes through checks and race, and dies when its memory is measured."""

    moment = "peak_memory"

    def __init__(self, model: nn.Module, example: Inputs, setting: Setting) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        if self.moment in {frame.name for frame in traceback.extract_stack()}:
            os.kill(os.getpid(), signal.SIGKILL)
        output: Tensor = self.model(x)
        return output


class DieInTheRace(DieLate):
    """Goes through the checks, and dies when it is timed."""

    moment = "turn"


SCRIPTS = {
    "right": WAYS[Variant.script],
    "wrong": Way(off_by_a_little),
    "cached": Way(as_it_is, disk_cache=True),
    "remembers": Way(remember),
    "dies of three rows": Way(die_of_three_rows),
    "dies late": Way(DieLate),
    "dies in the race": Way(DieInTheRace),
    "broken when saved": Way(torchscript.script, ".pt", save_without_weights, torchscript.load),
}


def experiment(
    folder: Path, make_model: Callable[[], nn.Module], script: str, **fields: Any
) -> tuple[str, list[dict[str, str]]]:
    """A jit job on a model of the test's own, with the variant `script` built as `SCRIPTS` says."""
    spec = parse_spec({"kind": "jit", "model": {"preset": "mlp"}, "budget_s": 0.3, **fields})
    assert isinstance(spec, JitSpec)
    bench = Bench.local(folder)
    setting = Setting(
        make_model=make_model,
        make_inputs=lambda batch, seed, dtype, device: (
            torch.randn(batch, 4, generator=torch.Generator().manual_seed(seed)).abs().to(device, dtype),
        ),
        folder=folder,
        device=torch.device("cpu"),
        batch_sizes=tuple(spec.batch_sizes),
    )
    ways = WAYS | {Variant.script: SCRIPTS[script]}
    return Experiment(spec, bench, setting, ways).run().to_json(), bench.kept


def verdicts(text: str) -> dict[str, tuple[str, str]]:
    result = Result.model_validate_json(text)
    return {c.of: (c.verdict, c.reason or "") for c in result.comparisons if c.name == "latency"}


def test_a_wrong_output_gets_no_speedup(tmp_path: Path) -> None:
    text, _ = call_fresh(experiment, tmp_path, partial(nn.Linear, 4, 4), "wrong", variants=["eager", "script", "trace"])
    found = verdicts(text)
    assert found["script"][0] == "withheld"
    assert "not equal to eager" in found["script"][1]
    assert found["trace"][0] != "withheld"
    (row,) = [c for c in Result.model_validate_json(text).comparisons if c.of == "script"]
    assert row.speedup is None


def test_a_trace_that_froze_a_branch_gets_no_speedup(tmp_path: Path) -> None:
    text, _ = call_fresh(experiment, tmp_path, Branching, "right", variants=["eager", "script", "trace"])
    found = verdicts(text)
    assert found["trace"][0] == "withheld"
    assert "froze" in found["trace"][1]
    assert found["script"][0] != "withheld"


def test_a_trace_that_froze_the_batch_size_gets_no_speedup(tmp_path: Path) -> None:
    text, _ = call_fresh(experiment, tmp_path, Unbinding, "right", variants=["eager", "trace"], batch_sizes=[2])
    found = verdicts(text)
    assert found["trace"][0] == "withheld"
    assert "froze the batch size" in found["trace"][1]


def test_a_file_that_lost_something_when_it_was_saved_is_not_offered(tmp_path: Path) -> None:
    text, kept = call_fresh(
        experiment, tmp_path, partial(nn.Linear, 4, 4), "broken when saved", variants=["eager", "script", "trace"]
    )
    assert verdicts(text)["script"][0] == "withheld"
    names = [file["name"] for file in kept]
    assert "script.pt" not in names
    assert "trace.pt" in names


def test_a_form_that_remembers_its_output_gets_no_speedup(tmp_path: Path) -> None:
    """Right for every tensor it meets, and timed on one that it knows already."""
    text, _ = call_fresh(experiment, tmp_path, partial(nn.Linear, 4, 4), "remembers", variants=["eager", "script"])
    found = verdicts(text)
    assert found["script"][0] == "withheld"
    assert "froze" in found["script"][1]


def test_a_form_that_dies_of_another_input_gets_no_speedup(tmp_path: Path) -> None:
    text, _ = call_fresh(
        experiment, tmp_path, partial(nn.Linear, 4, 4), "dies of three rows", variants=["eager", "script", "trace"]
    )
    result, found = Result.model_validate_json(text), verdicts(text)
    assert found["script"][0] == "withheld"
    assert found["trace"][0] != "withheld"
    assert [(row.of, row.status) for row in result.skipped] == [("script", "failed")]


def test_a_form_that_dies_when_its_memory_is_measured_leaves_the_others(tmp_path: Path) -> None:
    variants, sizes = ["eager", "script", "trace"], [2, 4]
    text, _ = call_fresh(
        experiment, tmp_path, partial(nn.Linear, 4, 4), "dies late", variants=variants, batch_sizes=sizes, calls=2
    )
    found = verdicts(text)
    assert found["script"][0] == "withheld"
    assert found["trace"][0] != "withheld"


def test_a_baseline_that_dies_in_the_race_is_told_as_what_it_died_of(tmp_path: Path) -> None:
    fields = {"variants": ["eager", "script"], "baseline": "script"}
    with pytest.raises(ProcessDied, match="the baseline script failed: its process was killed by SIGKILL"):
        call_fresh(partial(experiment, **fields), tmp_path, partial(nn.Linear, 4, 4), "dies in the race")


class Nearby(Stopwatch):
    """A lane of the race in this very process: what costs time in a contestant's is its process, not its clock."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        super().__init__()
        self.name = name
        self.calls["p"] = call

    def ask(self, request: str, /, **arguments: Any) -> Any:
        return getattr(self, request)(**arguments)


@pytest.mark.slow
def test_of_two_hundred_races_of_identical_contestants_few_cry_different() -> None:
    """Designed for 2 % at most; 10 % is where chance alone does not reach."""
    numbers = np.random.default_rng(0).random(20_000)
    cries = 0
    for trial in range(200):
        lanes: list[Lane] = [Nearby(name, numbers.cumsum) for name in ("a", "a_again", "b")]
        plan = Plan("a", 0.01, 2.0, calls=240, seed=trial)
        found = judge(race(lanes, "p", plan), plan, {}, "p", {}, {lane.name: {"build_s": 0.0} for lane in lanes})
        (told,) = [c for c in found.comparisons if c.of == "b"]
        cries += told.verdict in ("faster", "slower")
    assert cries <= 20


@pytest.mark.parametrize("warm", [False, True])
def test_a_build_that_found_its_cache_filled_is_not_taken_for_a_cold_one(warm: bool, tmp_path: Path) -> None:
    if warm:
        (tmp_path / "cache-script").mkdir()
        (tmp_path / "cache-script" / "left").touch()
    fields = {"variants": ["eager", "script"], "calls": 60}
    text, _ = call_fresh(experiment, tmp_path, partial(nn.Linear, 4, 4), "cached", **fields)
    quality = Result.model_validate_json(text).quality
    assert ("already_warm" in {code.code for code in quality.codes}) == warm
    assert quality.grade == "invalid" or not warm
