"""The `jit` experiment, run as a worker runs it, on real models."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.worker.fresh import Outcome, call_fresh, run_fresh
from torchstone.errors import InvalidModel, WorkloadError
from torchstone.results import Result
from torchstone.specs import parse_spec
from worker.bench import Bench, LeasedDevice
from worker.contestants.reproduce import reproduction
from worker.measure import statistics
from worker.workloads import workload

MLP = {"kind": "jit", "model": {"preset": "mlp"}, "variants": ["eager", "script", "trace"], "budget_s": 1.0}


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_fresh(MLP | {"batch_sizes": [1, 64], "budget_s": 2.0}, tmp_path_factory.mktemp("mlp"))


def load_samples(outcome: Outcome) -> dict[str, Any]:
    with np.load(outcome.kept["samples.npz"]) as archive:
        return dict(archive)


def test_every_variant_is_timed_checked_and_compared_at_every_batch_size(mlp: Outcome) -> None:
    points = {(of, size) for of in ("eager", "script", "trace") for size in (1, 64)}
    latencies = [t for t in mlp.result.timings if t.name == "latency"]
    assert {(t.of, t.at["batch_size"]) for t in latencies} == points
    assert all(t.n >= 1 and t.median and t.first_call_s for t in latencies)
    assert {(c.of, c.at["batch_size"]) for c in mlp.result.comparisons if c.name == "latency"} == {
        point for point in points if point[0] != "eager"
    }
    assert all(c.verdict != "withheld" and c.speedup for c in mlp.result.comparisons)
    for what in ("equal_to_eager", "equal_to_float64"):
        checked = {(c.of, c.at["batch_size"]) for c in mlp.result.checks if c.name == what and c.passed}
        assert checked >= points - {("eager", 1), ("eager", 64)}
    assert mlp.result.skipped == []


def test_builds_are_told_apart_from_calls(mlp: Outcome) -> None:
    for timing in mlp.result.timings:
        compiled = timing.of in ("script", "trace")
        assert (timing.build_cold_s is not None) == compiled
        assert (timing.build_warm_s is not None) == compiled


def test_the_baseline_races_itself(mlp: Outcome) -> None:
    again = [c for c in mlp.result.comparisons if c.name == "noise"]
    assert [(c.of, c.against) for c in again] == [("eager_again", "eager")] * 2
    floors = [abs(c.speedup - 1) for c in again if c.speedup]
    assert mlp.result.noise_floor == pytest.approx(max(floors))


def test_every_statistic_recomputes_from_the_raw_samples(mlp: Outcome) -> None:
    archive = load_samples(mlp)
    meta = json.loads(archive["meta"].item())
    for timing in mlp.result.timings:
        name, key = (timing.samples or "").split("#")
        assert name == "samples.npz"
        raw = archive[key]
        expected = {
            "n": len(raw),
            "min": raw.min(),
            "median": np.median(raw),
            "mean": raw.mean(),
            "std": raw.std(ddof=1) if len(raw) > 1 else None,
            "p10": np.percentile(raw, 10),
            "iqr": np.percentile(raw, 75) - np.percentile(raw, 25),
        }
        for field, value in expected.items():
            assert getattr(timing, field) == (value and pytest.approx(value, rel=1e-9)), field
    for row in mlp.result.comparisons:
        key = str(row.at["batch_size"])
        of, against = archive[f"{row.of}/{key}"], archive[f"{row.against}/{key}"]
        again = statistics.compare(of, against, alpha=meta[key]["alpha"], seed=meta[key]["seed"])
        assert row.speedup == pytest.approx(np.median(against) / np.median(of), rel=1e-9)
        assert row.ci95 == (pytest.approx(again.interval, rel=1e-9) if len(of) >= statistics.FEWEST_ROUNDS else None)


def test_the_budget_is_kept(mlp: Outcome) -> None:
    meta = json.loads(load_samples(mlp)["meta"].item())
    assert sum(meta[key]["spent_s"] for key in ("1", "64")) <= 2.0 * 1.1


def test_the_environment_names_the_machine_and_the_mode(mlp: Outcome) -> None:
    (host,) = mlp.result.environment["hosts"]
    assert host["cpu_model"]
    assert host["libraries"]["torch"].startswith("2.")
    assert host["torch"]["threads"] == len(host["cores"])
    assert host["torch"]["inference_mode"] is True
    assert host["during"]["our_share"] > 0


def test_progress_is_told_with_an_eta(mlp: Outcome) -> None:
    told = [event["progress"] for event in mlp.events if event["type"] == "progress"]
    assert any(p["unit"] == "rounds" and p["done"] > 0 and p["eta_s"] is not None for p in told)
    begun = {p["message"] for p in told}  # each, however soon it came after the one before
    assert {f"building {c.of}" for c in mlp.result.comparisons if c.of != "eager_again"} <= begun, begun


def test_an_exported_file_runs_without_torchstone(mlp: Outcome, tmp_path: Path) -> None:
    program = (
        "import sys, warnings, torch; warnings.simplefilter('ignore')\n"
        "assert not any('torchstone' in m or m.startswith('worker') for m in sys.modules)\n"
        "print(torch.jit.load(sys.argv[1])(torch.zeros(3, 512)).shape)"
    )
    for name in ("script.pt", "trace.pt"):
        ran = subprocess.run(
            [sys.executable, "-I", "-c", program, str(mlp.kept[name])], cwd=tmp_path, capture_output=True, text=True
        )
        assert ran.stdout.strip() == "torch.Size([3, 2])", ran.stderr


def test_a_passport_proves_its_own_loader(mlp: Outcome, tmp_path: Path) -> None:
    for name in ("script.pt", "trace.pt"):
        passport = json.loads(mlp.kept[f"{name}.passport.json"].read_text())
        assert passport["sha256"] == hashlib.sha256(mlp.kept[name].read_bytes()).hexdigest()
        assert passport["check"]["passed"] is True
        assert passport["made_by"]["torch"].startswith("2.")
        program = "import torch\nx = torch.ones(2, 512)\n" + passport["loader"] + "print(tuple(output.shape))"
        ran = subprocess.run(
            [sys.executable, "-I", "-W", "ignore", "-c", program],
            cwd=mlp.kept[name].parent,
            capture_output=True,
            text=True,
        )
        assert ran.stdout.strip() == "(2, 2)", ran.stderr
    assert [c.of for c in mlp.result.checks if c.name == "loads_without_torchstone" and c.passed] == ["script", "trace"]


def test_exports_are_probed_for_what_they_froze(mlp: Outcome) -> None:
    for of in ("script", "trace"):
        probed = {c.at["inputs"] for c in mlp.result.checks if c.name == "generalises" and c.of == of and c.passed}
        assert probed == {"other_values", "negated", "batch_3"}
        names = {c.name for c in mlp.result.checks if c.of == of and c.passed}
        assert {"two_calls_agree", "row_alone_agrees"} <= names


def test_memory_is_told_from_a_pass_of_its_own(mlp: Outcome) -> None:
    peaks = {(f.of, f.at["batch_size"]): f.value for f in mlp.result.figures if f.name == "peak_bytes"}
    assert set(peaks) == {(of, size) for of in ("eager", "script", "trace") for size in (1, 64)}
    assert all(value and value > 2**20 for value in peaks.values())


def test_reproduce_py_repeats_the_measurement_without_torchstone(mlp: Outcome, tmp_path: Path) -> None:
    script = mlp.kept["reproduce.py"]
    assert "torchstone." not in script.read_text()
    ran = subprocess.run([sys.executable, "-I", str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for variant in ("eager", "script", "trace"):
        assert f"batch 64, {variant}: largest difference to eager 0" in ran.stdout
        assert f"batch 1, {variant}: median" in ran.stdout


def test_a_model_that_looks_at_the_whole_batch_is_compared_with_eager_of_a_row_alone(tmp_path: Path) -> None:
    convolution = {"type": "Conv2d", "in_channels": 1, "out_channels": 3, "kernel_size": 3}
    norm = {"type": "BatchNorm2d", "num_features": 3, "track_running_stats": False}
    model = {"layers": [convolution, norm], "input_shape": [1, 6, 6]}
    result = run_fresh(MLP | {"model": model, "batch_sizes": [4], "budget_s": 0.3}, tmp_path).result
    assert [c for c in result.checks if not c.passed] == []
    assert {c.verdict for c in result.comparisons} & {"withheld"} == set()
    assert {c.of for c in result.checks if c.at.get("inputs") == "row_alone"} == {"script", "trace"}


def test_reproduce_py_goes_on_where_a_variant_cannot_be_built(tmp_path: Path) -> None:
    pool = {"type": "AdaptiveAvgPool2d", "output_size": [1, None]}  # TorchScript takes no None there
    model = {"layers": [pool, {"type": "Flatten"}], "input_shape": [1, 4, 4]}
    outcome = run_fresh(MLP | {"model": model, "budget_s": 0.3}, tmp_path)
    assert [row.of for row in outcome.result.skipped] == ["script"]
    command = [sys.executable, "-I", str(outcome.kept["reproduce.py"])]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "batch 1, script: fails: RuntimeError" in ran.stdout and "batch 1, trace: median" in ran.stdout


def test_a_fixed_number_of_calls_is_timed_exactly(tmp_path: Path) -> None:
    outcome = run_fresh(MLP | {"calls": 1000, "budget_s": 20}, tmp_path)
    archive = load_samples(outcome)
    for name in ("eager", "script", "trace", "eager_again"):
        assert archive[f"{name}/1/calls"].sum() == 1000
        assert len(archive[f"{name}/1"]) >= 20


def test_one_sided_results_are_withheld_and_nan_in_the_same_place_is_equal(tmp_path: Path) -> None:
    model = {"layers": [{"type": "Sqrt"}], "input_shape": [2], "example_input": [1.0, -1.0]}
    outcome = run_fresh(MLP | {"model": model, "budget_s": 0.2}, tmp_path)
    assert {c.nan_count for c in outcome.result.checks if c.name.startswith("equal_to")} == {1}
    assert all(c.passed for c in outcome.result.checks)
    json.loads(outcome.result.to_json(), parse_constant=_refuse)


def _refuse(word: str) -> Any:
    raise AssertionError(f"{word} in JSON")


def test_a_model_that_does_not_run_on_its_input_names_the_layer(tmp_path: Path) -> None:
    # BatchNorm in training mode (a training step) needs more than one value per channel.
    model = {
        "layers": [{"type": "Linear", "in_features": 4, "out_features": 3}, {"type": "BatchNorm1d", "num_features": 3}],
        "input_shape": [4],
    }
    with pytest.raises(InvalidModel, match=r"layer 1 \(BatchNorm1d"):
        run_fresh(MLP | {"model": model, "grad": True}, tmp_path)


def test_training_steps_are_timed_and_gradients_checked(tmp_path: Path) -> None:
    model = {
        "layers": [{"type": "Linear", "in_features": 4, "out_features": 3}, {"type": "Dropout"}, {"type": "ReLU"}],
        "input_shape": [4],
    }
    outcome = run_fresh(MLP | {"model": model, "grad": True, "batch_sizes": [8], "budget_s": 0.2}, tmp_path)
    assert all(c.passed for c in outcome.result.checks)
    assert {c.of for c in outcome.result.checks} == {"eager", "script", "trace"}
    assert "script.pt" in outcome.kept
    assert outcome.result.environment["hosts"][0]["torch"]["grad"] is True


def test_the_result_is_strict_json(mlp: Outcome) -> None:
    text = mlp.result.to_json()
    json.loads(text, parse_constant=_refuse)
    assert Result.model_validate_json(text) == mlp.result


def test_caches_may_be_emptied_before_each_call(tmp_path: Path) -> None:
    outcome = run_fresh(MLP | {"variants": ["eager"], "cache": "both", "calls": 60, "budget_s": 10}, tmp_path)
    medians = {t.at["cache"]: t.median or 0.0 for t in outcome.result.timings if t.name == "latency"}
    assert medians["cold"] > medians["hot"]
    with np.load(outcome.kept["samples.npz"]) as archive:
        assert set(archive["eager/1/cold/calls"]) == {1}


def test_bfloat16_one_thread_and_a_profile(tmp_path: Path) -> None:
    fields = {"dtype": "bfloat16", "threads": 1, "profile": True, "budget_s": 0.5}
    outcome = run_fresh(MLP | fields, tmp_path)
    assert outcome.result.environment["hosts"][0]["torch"]["threads"] == 1
    assert outcome.result.environment["hosts"][0]["torch"]["dtype"] == "bfloat16"
    assert all(check.passed for check in outcome.result.checks)
    events = json.loads(outcome.kept["profile_eager.json"].read_text())["traceEvents"]
    assert any(event.get("name") == "aten::linear" for event in events)


def test_a_variant_without_gradients_is_left_out_of_a_training_step(tmp_path: Path) -> None:
    fields = {"variants": ["eager", "script_frozen", "export_aot"], "grad": True, "batch_sizes": [4], "budget_s": 0.2}
    result = run_fresh(MLP | fields, tmp_path).result
    assert {row.of for row in result.skipped} == {"script_frozen", "export_aot"}
    assert all("gradients" in row.reason and row.status == "skipped" for row in result.skipped)


def test_what_a_training_job_offers_has_learned_nothing_from_being_measured(tmp_path: Path) -> None:
    """The reference must not hold what its BatchNorm learned from the calls that it was measured with."""
    linear = {"type": "Linear", "in_features": 8, "out_features": 8}
    model = {"layers": [linear, {"type": "BatchNorm1d", "num_features": 8}, linear], "input_shape": [8]}
    fields = {"model": model, "grad": True, "batch_sizes": [8], "calls": 2, "variants": ["eager", "trace"]}
    outcome = run_fresh(MLP | fields, tmp_path)
    assert [c for c in outcome.result.checks if not c.passed] == []
    assert "trace.pt" in outcome.kept


def test_attention_drops_nothing_while_a_training_step_is_checked(tmp_path: Path) -> None:
    """MultiheadAttention's dropout is a number, not a layer."""
    layer = {"type": "TransformerEncoderLayer", "d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}
    model = {"layers": [layer], "input_shape": [5, 8]}
    fields = {"model": model, "grad": True, "batch_sizes": [4], "calls": 2, "variants": ["eager", "trace"]}
    outcome = run_fresh(MLP | fields, tmp_path)
    assert [c for c in outcome.result.checks if not c.passed] == []


def test_rounding_that_is_all_there_is_passes_where_eager_is_no_better(tmp_path: Path) -> None:
    """A normalisation of a constant leaves rounding alone: probes need float64 to see that it is no frozen branch."""
    layers = [
        {"type": "Conv2d", "in_channels": 2, "out_channels": 4, "kernel_size": 1},
        {"type": "InstanceNorm2d", "num_features": 4},
    ]
    example = [[[0.3] * 4] * 4, [[0.7] * 4] * 4]
    model = {"layers": layers, "input_shape": [2, 4, 4], "example_input": example}
    outcome = run_fresh(MLP | {"model": model, "calls": 2}, tmp_path)
    assert all(c.verdict != "withheld" for c in outcome.result.comparisons)


def test_a_passport_names_the_type_that_the_file_takes(tmp_path: Path) -> None:
    layers = [{"type": "Embedding", "num_embeddings": 9, "embedding_dim": 4}]
    outcome = run_fresh(MLP | {"model": {"layers": layers, "input_shape": [3]}, "calls": 2}, tmp_path)
    passport = json.loads(outcome.kept["trace.pt.passport.json"].read_text())
    assert passport["inputs"] == [{"shape": ["batch", 3], "dtype": "int64"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"variants": ["script_optimized", "trace_frozen"], "baseline": "trace_frozen"},
        {"variants": ["onnxruntime", "trace"], "baseline": "onnxruntime"},
        {"variants": ["eager", "trace", "script_frozen"], "grad": True, "dtype": "bfloat16"},
        {"variants": ["eager", "script"], "model": {"preset": "lenet"}, "channels_last": True},
    ],
)
def test_reproduce_py_runs_for_any_variants_baseline_and_mode(fields: dict[str, Any], tmp_path: Path) -> None:
    spec = parse_spec(MLP | {"batch_sizes": [2], "budget_s": 0.1} | fields)
    (script := tmp_path / "reproduce.py").write_text(reproduction(spec, 1))
    ran = subprocess.run([sys.executable, "-I", str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for variant in fields["variants"]:
        absent = variant == "onnxruntime" or (variant == "script_frozen" and fields.get("grad"))
        assert (f"batch 2, {variant}: median" in ran.stdout) == (not absent), ran.stdout
        assert not absent or variant in ran.stdout.partition("\n")[0]


def run_with_a_spare_core(spec: dict[str, Any], folder: Path) -> tuple[str, list[str]]:
    measured, *spare = sorted(os.sched_getaffinity(0))
    leased = [LeasedDevice("cpu:0", "cpu", (measured,))]
    bench = Bench("spare", 1, "localhost", leased, folder, spare_cores=tuple(spare))
    result = workload("jit")(parse_spec(spec), bench)
    return result.to_json(), [file["name"] for file in bench.kept]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a second core")
def test_what_is_not_measured_goes_on_elsewhere(tmp_path: Path) -> None:
    text, kept = call_fresh(run_with_a_spare_core, MLP | {"budget_s": 0.3}, tmp_path)
    result = Result.model_validate_json(text)
    [host] = result.environment["hosts"]
    assert host["torch"]["affinity"] == host["cores"] == sorted(os.sched_getaffinity(0))[:1]
    assert not result.skipped and all(check.passed for check in result.checks)
    assert {"script.pt", "script.pt.passport.json", "trace.pt", "trace.pt.passport.json"} <= set(kept)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a second core")
def test_a_model_that_does_not_run_is_told_by_its_layer_even_where_a_build_failed_first(tmp_path: Path) -> None:
    model = {
        "layers": [{"type": "Linear", "in_features": 4, "out_features": 3}, {"type": "BatchNorm1d", "num_features": 3}],
        "input_shape": [4],
    }
    spec = {"kind": "jit", "model": model, "variants": ["eager", "trace"], "baseline": "trace", "grad": True}
    with pytest.raises(InvalidModel, match=r"layer 1 \(BatchNorm1d"):
        call_fresh(run_with_a_spare_core, spec, tmp_path)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a second core")
def test_right_answers_that_cannot_be_had_end_the_job_where_a_build_needs_them(tmp_path: Path) -> None:
    (tmp_path / "inputs.pt").mkdir()  # where the reference wants to write what the exported files are run on
    with pytest.raises(WorkloadError, match="Is a directory"):
        call_fresh(run_with_a_spare_core, MLP, tmp_path)
