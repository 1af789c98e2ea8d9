"""The `train` experiment, run as a worker runs it, on small data."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.worker.fresh import Outcome, call_fresh, run_fresh
from torchstone.results import Check, Curve, Result
from torchstone.specs import parse_spec
from worker.bench import Bench
from worker.workloads import workload

DIGITS: dict[str, Any] = {
    "kind": "train",
    "model": {"preset": "mlp"},
    "dataset": {"name": "digits"},
    "strategies": ["single", "scratch", "ddp"],
    "devices": {"count": 2},
    "epochs": 2,
    "batch_size": 100,
    "optimizer": {"name": "sgd", "lr": 0.1},
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_fresh(DIGITS, tmp_path_factory.mktemp("digits"))


def figure(result: Result, name: str, of: str, **at: Any) -> float | None:
    (found,) = [f for f in result.figures if (f.name, f.of) == (name, of) and f.at.items() >= at.items()]
    return found.value


def curve(result: Result, name: str, of: str, x_name: str = "epoch", **at: Any) -> Curve:
    (found,) = [
        c for c in result.curves if (c.name, c.of, c.x_name) == (name, of, x_name) and c.at.items() >= at.items()
    ]
    return found


def checks(result: Result, name: str, of: str) -> list[Check]:
    return [c for c in result.checks if (c.name, c.of) == (name, of)]


def test_every_strategy_is_proven_equal_before_it_is_timed(digits: Outcome) -> None:
    for of in DIGITS["strategies"]:
        equal = checks(digits.result, "equal_to_single", of)
        assert {c.at["what"] for c in equal} == {"loss", "gradient", "weights"}
        assert all(c.passed for c in equal), [c for c in equal if not c.passed]
        assert all(c.passed for c in checks(digits.result, "replicas_equal", of))
    batches = {c.at["batch"] for c in checks(digits.result, "equal_to_single", "ddp")}
    assert batches == {"shares", "whole"}, "without dropout and BatchNorm the unsplit batch must give the same"


def test_epochs_steps_and_samples_are_told(digits: Outcome) -> None:
    for of in DIGITS["strategies"]:
        timings = {t.name: t for t in digits.result.timings if t.of == of}
        assert timings["epoch"].n == 2
        assert timings["step"].n == 2 * 14, "the fifteenth batch of an epoch is short"
        assert figure(digits.result, "samples_seen", of) == 2 * 1442
        assert figure(digits.result, "eval_samples", of) == 355
        assert figure(digits.result, "learning_rate", of) == 0.1
        assert figure(digits.result, "diverged", of) == 0
    compared = {(c.name, c.of, c.against) for c in digits.result.comparisons}
    assert compared == {(name, of, "single") for name in ("epoch", "step") for of in ("scratch", "ddp")}


def test_the_noise_floor_is_that_of_two_halves_of_the_same(digits: Outcome) -> None:
    with np.load(digits.kept["samples.npz"]) as archive:
        steps = archive["single/step"].reshape(2, 14)
    apart = abs(np.median(steps[1]) / np.median(steps[0]) - 1)
    assert digits.result.noise_floor == pytest.approx(apart)
    assert {c.noise_floor for c in digits.result.comparisons} == {digits.result.noise_floor}


def test_all_strategies_learn_the_same(digits: Outcome) -> None:
    losses = [curve(digits.result, "train_loss", of).y for of in DIGITS["strategies"]]
    assert losses[0][1] is not None and losses[0][0] is not None and losses[0][1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_the_parts_of_a_step_add_up_to_it(digits: Outcome) -> None:
    with np.load(digits.kept["samples.npz"]) as archive:
        marks = archive["ddp/marks"]
    step_s = (marks[:, 0, 4] - marks[:, 0, 0]).mean()
    parts = [figure(digits.result, f"step_{name}_s", "ddp", rank=0) for name in ("input", "compute", "wait")]
    communication_s = figure(digits.result, "step_communication_s", "ddp", rank=0)
    assert sum(p for p in [*parts, communication_s] if p is not None) == pytest.approx(step_s, rel=1e-6)
    assert all(p is not None and p >= 0 for p in [*parts, communication_s])


def test_the_exported_model_is_the_trained_one(digits: Outcome) -> None:
    for of in DIGITS["strategies"]:
        assert {f"{of}.pt", f"{of}.safetensors"} <= digits.kept.keys()
        accuracy = figure(digits.result, "test_accuracy", of)
        assert accuracy is not None and accuracy > 0.7
        assert figure(digits.result, "exported_accuracy", of) == pytest.approx(accuracy, abs=0.003)


def test_progress_counts_steps_to_the_end(digits: Outcome) -> None:
    told = [e["progress"] for e in digits.events if e["type"] == "progress"]
    assert told[-1]["unit"] == "steps" and told[-1]["total"] == 3 * 2 * 15
    done = [p["done"] for p in told]
    assert done == sorted(done)


R: dict[str, Any] = {
    "kind": "train",
    "model": {
        "layers": [{"type": "Linear", "in_features": 1, "out_features": 2, "bias": False}],
        "input_shape": [1],
        "init": "zeros",
    },
    "dataset": {"inline": {"x": [[float(i)] for i in range(1, 11)], "y": [0] * 10, "classes": 2}},
    "strategies": ["single", "scratch", "ddp"],
    "devices": {"count": 2},
    "epochs": 1,
    "batch_size": 10,
    "shuffle": False,
    "optimizer": {"name": "sgd", "lr": 0.2},
    "record_steps": True,
}
"""A hand calculation: softmax of equal logits is 1/2, so the gradient is -+ mean(x) / 2 = -+2.75."""


def weights_of(outcome: Outcome, of: str) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return dict(load_file(outcome.kept[f"{of}.safetensors"]))


def test_a_mean_is_over_the_true_global_batch(tmp_path: Path) -> None:
    outcome = run_fresh(R, tmp_path)
    for of in R["strategies"]:
        (weight,) = weights_of(outcome, of).values()
        assert weight.ravel().tolist() == pytest.approx([0.55, -0.55], rel=1e-6), of
        assert curve(outcome.result, "step_loss", of, "step").y == pytest.approx([math.log(2)])


def test_a_sum_is_not_divided(tmp_path: Path) -> None:
    outcome = run_fresh({**R, "loss_reduction": "sum", "strategies": ["single", "ddp"]}, tmp_path)
    for of in ("single", "ddp"):
        (weight,) = weights_of(outcome, of).values()
        assert weight.ravel().tolist() == pytest.approx([5.5, -5.5], rel=1e-6), of
        assert curve(outcome.result, "step_loss", of, "step").y == pytest.approx([10 * math.log(2)])


def test_a_diverging_strategy_is_a_result(tmp_path: Path) -> None:
    data = {"inline": {**R["dataset"]["inline"], "y": [0, 1] * 5}}
    spec = {
        **R,
        "dataset": data,
        "epochs": 4,
        "optimizer": {"name": "sgd", "lr": 3e38},
        "strategies": ["single", "ddp"],
    }
    outcome = run_fresh(spec, tmp_path)
    for of in ("single", "ddp"):
        assert figure(outcome.result, "diverged", of) == 1
        first, *rest = curve(outcome.result, "step_loss", of, "step").y
        assert first == pytest.approx(0.6931, abs=1e-4)
        assert rest == [None, None, None]


def test_uneven_steps_do_not_hang(tmp_path: Path) -> None:
    data = {"inline": {"x": [[float(i)] for i in range(13)], "y": [0, 1] * 6 + [0], "classes": 2}}
    spec = {**R, "dataset": data, "batch_size": 4, "shuffle": True, "strategies": ["ddp", "scratch"]}
    for drop_last, seen in ((False, 13), (True, 12)):
        folder = tmp_path / str(seen)
        folder.mkdir()
        outcome = run_fresh({**spec, "drop_last": drop_last}, folder)
        for of in ("ddp", "scratch"):
            assert figure(outcome.result, "samples_seen", of) == seen
            assert all(c.passed for c in outcome.result.checks)


def test_shuffling_differs_by_epoch_and_repeats_by_seed(tmp_path: Path) -> None:
    model = {**R["model"], "init": "default"}
    optimizer = {"name": "sgd", "lr": 0.0}
    spec = {**R, "model": model, "batch_size": 1, "shuffle": True, "epochs": 3, "optimizer": optimizer}
    losses = {}
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        folder = tmp_path / name
        folder.mkdir()
        outcome = run_fresh({**spec, "seed": seed, "strategies": ["ddp"]}, folder)
        losses[name] = curve(outcome.result, "step_loss", "ddp", "step").y
    first = losses["first"]
    epochs = [first[:10], first[10:20], first[20:]]
    assert sorted(epochs[1]) == pytest.approx(sorted(epochs[0]))
    assert sorted(epochs[2]) == pytest.approx(sorted(epochs[0]))
    assert epochs[0] != epochs[1] != epochs[2]
    assert losses["again"] == first
    assert losses["other"] != first


def test_every_rank_has_a_random_stream_of_its_own(tmp_path: Path) -> None:
    layers = [
        {"type": "Linear", "in_features": 2, "out_features": 256},
        {"type": "ReLU"},
        {"type": "Dropout", "p": 0.5},
        {"type": "Linear", "in_features": 256, "out_features": 2},
    ]
    data = {"inline": {"x": [[1.0, 2.0]] * 8, "y": [1] * 8, "classes": 2}}
    spec = {
        **R,
        "model": {"layers": layers, "input_shape": [2]},
        "dataset": data,
        "batch_size": 8,
        "optimizer": {"name": "sgd", "lr": 0.0},
        "epochs": 2,
        "strategies": ["scratch", "ddp"],
    }
    losses = {}
    for name, p in (("first", 0.5), ("again", 0.5), ("none", 0.0)):
        layers[2]["p"] = p
        folder = tmp_path / name
        folder.mkdir()
        outcome = run_fresh(spec, folder)
        assert all(c.passed for c in outcome.result.checks), outcome.result.checks
        for of in ("scratch", "ddp"):
            losses[name, of] = [curve(outcome.result, "rank_loss", of, "step", rank=r).y for r in (0, 1)]
    for of in ("scratch", "ddp"):
        assert losses["first", of][0] != losses["first", of][1]
        assert losses["again", of] == losses["first", of]
        assert losses["none", of][0] == losses["none", of][1]
    assert losses["first", "scratch"] == losses["first", "ddp"]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_reproduction_gives_the_same_without_torchstone(devices: int, digits: Outcome, tmp_path: Path) -> None:
    for name in ("reproduce.py", "data.npz"):
        shutil.copy(digits.kept[name], tmp_path / name)
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(devices), "--standalone"] if devices > 1 else []
    command = [sys.executable, *start, "reproduce.py"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    told = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("epoch")]
    assert told == pytest.approx(curve(digits.result, "test_accuracy", "ddp").y, abs=0.006)


def test_weak_scaling_gives_each_device_the_whole_batch(tmp_path: Path) -> None:
    spec = {
        **DIGITS,
        "strategies": ["single", "ddp"],
        "scaling": ["strong", "weak"],
        "epochs": 1,
        "lr_scaling": "linear",
    }
    outcome = run_fresh(spec, tmp_path)
    result = outcome.result
    efficiencies = {f.at["scaling"]: f for f in result.figures if f.name == "scaling_efficiency"}
    assert efficiencies.keys() == {"strong", "weak"}
    with np.load(outcome.kept["samples.npz"]) as samples:
        single_s, weak_s = samples["single/step"], samples["ddp-weak/step"]
    # As many steps of each: of twice the samples an epoch has half the steps
    assert len(weak_s) == 7
    expected = float(np.median(single_s[:7]) / np.median(weak_s))
    assert efficiencies["weak"].value == pytest.approx(expected, rel=1e-6)
    assert next(t.n for t in result.timings if (t.name, t.of, t.at) == ("step", "ddp", {"scaling": "weak"})) == 7
    rates = {(f.of, f.at.get("scaling")): f.value for f in result.figures if f.name == "learning_rate"}
    assert rates == {("single", None): 0.1, ("ddp", None): 0.2, ("ddp", "weak"): 0.2}


def test_training_stops_at_the_target(tmp_path: Path) -> None:
    spec = {**DIGITS, "strategies": ["single", "ddp"], "epochs": 50, "target_accuracy": 0.8}
    result = run_fresh(spec, tmp_path).result
    for of in ("single", "ddp"):
        accuracies = curve(result, "test_accuracy", of).y
        assert len(accuracies) < 50
        assert accuracies[-1] is not None and accuracies[-1] >= 0.8
        assert all(a is not None and a < 0.8 for a in accuracies[:-1])
        seconds = curve(result, "test_accuracy", of, "s").x
        assert figure(result, "time_to_accuracy_s", of) == pytest.approx(seconds[-1])


CONVOLUTIONS: list[dict[str, Any]] = [
    {"type": "Conv2d", "in_channels": 1, "out_channels": 4, "kernel_size": 3},
    {"type": "BatchNorm2d", "num_features": 4},
    {"type": "ReLU"},
    {"type": "Flatten"},
    {"type": "Dropout", "p": 0.3},
    {"type": "Linear", "in_features": 144, "out_features": 10},
]


@pytest.mark.slow
@pytest.mark.timeout(300)  # every process compiles for itself
@pytest.mark.parametrize(
    "options",
    [
        {"strategies": ["single"]},
        {
            "strategies": ["single", "ddp"],
            "model": {"layers": CONVOLUTIONS, "input_shape": [1, 8, 8]},
            "gradient_accumulation": 4,
        },
    ],
    ids=["mlp", "dropout and accumulation"],
)
def test_a_compiled_model_is_the_same_and_its_build_is_told(tmp_path: Path, options: dict[str, Any]) -> None:
    result = run_fresh({**DIGITS, "epochs": 1, "compile": True, **options}, tmp_path).result
    assert result.skipped == []
    assert all(c.passed for c in result.checks), [c for c in result.checks if not c.passed]
    assert "not_compiled" not in {code.code for code in result.quality.codes}
    for timing in (t for t in result.timings if t.name == "step"):
        assert timing.build_cold_s is not None and timing.median is not None
        assert timing.build_cold_s > timing.median


def test_without_a_compiler_it_is_told_what_to_install(tmp_path: Path) -> None:
    spec = {**DIGITS, "strategies": ["single", "scratch"], "epochs": 1, "compile": True}
    result = Result.model_validate_json(call_fresh(_run_without_compiler, spec, tmp_path))
    (row,) = result.skipped
    assert (row.of, row.status) == ("single", "skipped") and "apt install g++" in row.reason
    assert any(t.of == "scratch" for t in result.timings)


def _run_without_compiler(spec: dict[str, Any], folder: Path) -> str:
    os.environ["CXX"] = "no-such-compiler"
    return workload("train")(parse_spec(spec), Bench.local(folder, devices=2)).to_json()


def test_few_steps_tell_no_noise(tmp_path: Path) -> None:
    spec = {**DIGITS, "strategies": ["single"], "epochs": 3, "max_steps": 16}
    result = run_fresh(spec, tmp_path).result
    assert result.noise_floor is None, "one step of a second epoch is no median"
    assert "noise_floor" not in {code.code for code in result.quality.codes}
    curve = next(curve for curve in result.curves if (curve.name, curve.x_name) == ("train_loss", "epoch"))
    assert curve.x == pytest.approx([1, 16 / 15]), "an epoch that was cut short stands where it ended"


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5000},
        {"model": {"layers": CONVOLUTIONS, "input_shape": [1, 8, 8]}, "batch_norm": "synchronized"},
    ],
    ids=["no batch is a full one", "layers that meet the other ranks"],
)
def test_what_the_compiler_leaves_as_it_is_is_told(tmp_path: Path, options: dict[str, Any]) -> None:
    result = run_fresh({**DIGITS, "strategies": ["ddp"], "epochs": 1, "compile": True, **options}, tmp_path).result
    assert all(c.passed for c in result.checks), [c for c in result.checks if not c.passed]
    (code,) = [code for code in result.quality.codes if code.code == "not_compiled"]
    assert code.evidence == {"of": "ddp"}
    assert [t.build_cold_s for t in result.timings if t.name == "step"] == [None]
