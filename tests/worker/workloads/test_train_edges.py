"""The `train` experiment where models, data and options meet at their edges: found by a review, each was wrong once."""

from __future__ import annotations

import errno
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.worker.fresh import call_fresh, run_fresh
from tests.worker.workloads.test_train import DIGITS, R, checks, curve, figure
from torchstone.errors import DataMissing, JobError
from torchstone.results import Result
from torchstone.specs import parse_spec
from worker.bench import Bench
from worker.parallel import forms, loop
from worker.parallel.group import Group
from worker.parallel.reference import Reference
from worker.parallel.setting import Setting
from worker.parallel.single import Single
from worker.workloads import train

TEN_ROWS: dict[str, Any] = R | {"record_steps": False}


def layers(*rows: dict[str, Any], input_shape: list[int]) -> dict[str, Any]:
    return {"layers": list(rows), "input_shape": input_shape}


def linear(inputs: int, outputs: int) -> dict[str, Any]:
    return {"type": "Linear", "in_features": inputs, "out_features": outputs}


def synthetic(samples: int, *shape: int, classes: int = 10) -> dict[str, Any]:
    return {"synthetic": {"shape": list(shape), "classes": classes, "samples": samples}}


def all_pass(result: Result) -> bool:
    return all(check.passed for check in result.checks)


def test_a_unit_at_the_kink_of_its_relu_is_no_difference_between_strategies(tmp_path: Path) -> None:
    """LeNet with seed 0 on its first 256 digits has one: in another memory layout it is on the other side."""
    spec = DIGITS | {"model": {"preset": "lenet"}, "batch_size": 256, "max_steps": 3, "seed": 0}
    result = run_fresh(spec, tmp_path).result
    assert all_pass(result), [check for check in result.checks if not check.passed]
    [row] = [c for c in checks(result, "equal_to_single", "single") if c.at["what"] == "gradient"]
    assert (row.norm_rel_error or 0) < (row.rtol or 0) or "units at the kink" in (row.detail or "")


def _with_the_mean_of_means(spec: dict[str, Any], folder: Path) -> str:
    """What DDP does by itself: every rank's mean counts the same, however many samples it has."""
    loss_of = Single.loss_of

    def unweighted(self: Single, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self, x, y)
        if self.setting.strategy != "ddp":
            return loss
        factor = spec["batch_size"] / (2 * len(x))
        return loss.detach() + factor * (loss - loss.detach())

    Single.loss_of = unweighted  # type: ignore[method-assign]
    return train.run(parse_spec(spec), Bench.local(folder, devices=2)).to_json()  # type: ignore[arg-type]


@pytest.mark.parametrize(("preset", "batch_size", "seed"), [("lenet", 257, 0), ("mlp", 65, 2)])
def test_units_at_a_kink_excuse_no_gradient_that_is_not_weighted_by_samples(
    preset: str, batch_size: int, seed: int, tmp_path: Path
) -> None:
    fields = {"model": {"preset": preset}, "batch_size": batch_size, "seed": seed, "max_steps": 3}
    spec = DIGITS | fields | {"strategies": ["single", "ddp"]}
    result = Result.model_validate_json(call_fresh(_with_the_mean_of_means, spec, tmp_path))
    assert all(check.passed for check in checks(result, "equal_to_single", "single"))
    assert {c.at["what"] for c in checks(result, "equal_to_single", "ddp") if not c.passed} == {"gradient", "weights"}


def test_what_the_preset_does_not_learn_is_told(tmp_path: Path) -> None:
    """The chapter's N(0, 0.01) is slow on a few hundred small images."""
    spec = DIGITS | {"model": {"preset": "lenet"}, "batch_size": 256, "max_steps": 6, "strategies": ["single"]}
    codes = {code.code for code in run_fresh(spec, tmp_path).result.quality.codes}
    assert "not_learning" in codes and "weak_proof" not in codes


def test_with_too_few_steps_there_is_no_efficiency(tmp_path: Path) -> None:
    result = run_fresh(TEN_ROWS, tmp_path).result
    assert {f.value for f in result.figures if f.name == "scaling_efficiency"} == {None}
    assert "too_few_rounds" in {code.code for code in result.quality.codes}
    assert result.quality.grade == "suspect"


def test_a_model_with_kinks_that_diverges_at_once_is_told_so(tmp_path: Path) -> None:
    spec = DIGITS | {"strategies": ["single", "ddp"], "max_steps": 6, "optimizer": {"name": "sgd", "lr": 3e38}}
    result = run_fresh(spec, tmp_path).result
    assert result.skipped == []
    assert {figure(result, "diverged", of) for of in ("single", "ddp")} == {1}


def test_a_loss_of_exactly_zero_is_a_number(tmp_path: Path) -> None:
    result = run_fresh(TEN_ROWS | {"epochs": 6, "optimizer": {"name": "sgd", "lr": 20}}, tmp_path).result
    for of in TEN_ROWS["strategies"]:
        assert curve(result, "train_loss", of).y[-1] == 0
        assert (figure(result, "diverged", of), figure(result, "samples_seen", of)) == (0, 60)


def test_statistics_of_instance_norm_are_those_of_shares_that_are_there(tmp_path: Path) -> None:
    """The last batch has one row: the second device has none of it."""
    convolution = {"type": "Conv2d", "in_channels": 1, "out_channels": 6, "kernel_size": 3}
    norm = {"type": "InstanceNorm2d", "num_features": 6, "track_running_stats": True}
    model = layers(convolution, norm, {"type": "ReLU"}, {"type": "Flatten"}, linear(216, 10), input_shape=[1, 8, 8])
    more = {"model": model, "dataset": synthetic(41, 1, 8, 8), "batch_size": 4, "epochs": 1}
    outcome = run_fresh(DIGITS | more | {"strategies": ["single", "scratch", "ddp", "pipeline"]}, tmp_path)
    assert all_pass(outcome.result)
    for of in ("scratch", "ddp"):
        assert all(np.isfinite(array).all() for array in load_file(outcome.kept[f"{of}.safetensors"]).values())


def test_threads_are_those_of_every_strategy_and_of_the_reproduction(tmp_path: Path) -> None:
    fields = {"threads": 2, "max_steps": 2, "strategies": ["single", "scratch"]}
    outcome = run_fresh(DIGITS | fields, tmp_path)
    assert "THREADS, EPOCHS, BATCH_SIZE = 0, 2," in outcome.kept["reproduce.py"].read_text()
    codes = {code.code: code.evidence for code in outcome.result.quality.codes}
    assert codes["oversubscribed"]["threads"] == 2


def test_a_weak_run_without_the_data_for_it_has_no_efficiency(tmp_path: Path) -> None:
    spec = TEN_ROWS | {"scaling": ["strong", "weak"], "strategies": ["single", "ddp"], "epochs": 6}
    result = run_fresh(spec, tmp_path).result
    [row] = [f for f in result.figures if f.name == "scaling_efficiency" and f.at == {"scaling": "weak"}]
    assert row.value is None and "the data do not hold a batch of 20" in (row.reason or "")


def test_a_batch_larger_than_the_data_counts_what_is_there(tmp_path: Path) -> None:
    result = run_fresh(TEN_ROWS | {"batch_size": 1000, "strategies": ["single"]}, tmp_path).result
    [row] = [f for f in result.figures if f.name == "roofline"]
    assert (row.model_extra or {})["flop"] == 10 * 8


def test_fsdp_gathers_its_weights_for_every_part_of_a_batch(tmp_path: Path) -> None:
    sent = []
    for parts in (1, 4):
        fields = {"strategies": ["single", "fsdp"], "gradient_accumulation": parts, "max_steps": 2}
        folder = tmp_path / str(parts)
        folder.mkdir()
        sent.append(figure(run_fresh(DIGITS | fields, folder).result, "bytes_per_step", "fsdp"))
    once, four_times = sent
    assert once and four_times == once / 3 * (2 * 4 + 1)


def test_a_model_that_scores_by_the_batch_is_exported_and_told(tmp_path: Path) -> None:
    norm = {"type": "BatchNorm1d", "num_features": 32, "track_running_stats": False}
    model = layers(linear(64, 32), norm, {"type": "ReLU"}, linear(32, 10), input_shape=[64])
    outcome = run_fresh(DIGITS | {"model": model, "eval_batch_size": 12, "strategies": ["single", "ddp"]}, tmp_path)
    assert {"single.pt", "ddp.pt"} <= outcome.kept.keys()
    assert "scored_in_other_batches" in {code.code for code in outcome.result.quality.codes}


def test_only_units_that_are_dropped_one_by_one_stand_between_layers_that_are_cut(tmp_path: Path) -> None:
    convolutions = [
        {"type": "Conv2d", "in_channels": 1, "out_channels": 4, "kernel_size": 3},
        {"type": "Dropout2d", "p": 0.3},
        {"type": "Conv2d", "in_channels": 4, "out_channels": 8, "kernel_size": 3},
    ]
    dense = [{"type": "Flatten"}, linear(128, 16), {"type": "Dropout", "p": 0.3}, linear(16, 10)]
    model = layers(*convolutions, *dense, input_shape=[1, 8, 8])
    result = run_fresh(DIGITS | {"model": model, "strategies": ["single", "tensor"]}, tmp_path).result
    assert result.skipped == [] and all_pass(result)


def test_batch_norm_without_a_bias_is_synchronized_too(tmp_path: Path) -> None:
    norm = {"type": "BatchNorm1d", "num_features": 16, "bias": False}
    model = layers(linear(64, 16), norm, linear(16, 10), input_shape=[64])
    fields = {"model": model, "batch_norm": "synchronized", "strategies": ["single", "ddp"]}
    result = run_fresh(DIGITS | fields, tmp_path).result
    assert result.skipped == [] and all_pass(result)


def test_a_share_of_one_sample_is_told_in_words(tmp_path: Path) -> None:
    norm = {"type": "BatchNorm1d", "num_features": 8}
    model = layers(linear(8, 8), norm, linear(8, 3), input_shape=[8])
    fields = {"model": model, "dataset": synthetic(7, 8, classes=3), "batch_size": 4, "strategies": ["single", "ddp"]}
    result = run_fresh(DIGITS | fields, tmp_path).result
    [row] = result.skipped
    assert row.of == "ddp" and "choose another batch_size, or drop_last" in row.reason


def _with_one_replica_of_nan(spec: dict[str, Any], folder: Path) -> str:
    update = Single.update

    def broken(self: Single, learning_rate: float) -> None:
        update(self, learning_rate)
        if self.rank == 1:
            for parameter in self.module.parameters():
                parameter.data.fill_(float("nan"))

    Single.update = broken  # type: ignore[method-assign]
    return train.run(parse_spec(spec), Bench.local(folder, devices=2)).to_json()  # type: ignore[arg-type]


def test_a_replica_that_is_no_number_is_not_equal(tmp_path: Path) -> None:
    text = call_fresh(
        _with_one_replica_of_nan, TEN_ROWS | {"strategies": ["single", "ddp"], "check_steps": 1}, tmp_path
    )
    result = Result.model_validate_json(text)
    assert not all(check.passed for check in checks(result, "replicas_equal", "ddp"))
    assert {row.verdict for row in result.comparisons} == {"withheld"}


def _with_a_full_disk(spec: dict[str, Any], folder: Path) -> str:
    save_file = loop.save_file

    def full(tensors: dict[str, Any], file: Path) -> None:
        if file.name.startswith("ddp") and file.suffix == ".state":
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, file)

    loop.save_file = full
    bench = Bench.local(folder, devices=2)
    bench.store, bench.checkpoint_s = lambda event: True, 1e-6
    return train.run(parse_spec(spec), bench).to_json()  # type: ignore[arg-type]


def test_a_checkpoint_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    text = call_fresh(_with_a_full_disk, TEN_ROWS | {"batch_size": 3, "epochs": 2}, tmp_path)
    result = Result.model_validate_json(text)
    assert result.skipped == []
    assert {figure(result, "samples_seen", of) for of in TEN_ROWS["strategies"]} == {20}


class Interrupted(Exception):
    """In place of a kill."""


def _attempt(spec: dict[str, Any], folder: Path, saved: Path, fails: bool) -> str:
    """One attempt: interrupted after its first save, or without its data before anything is known of the model."""
    bench = Bench.local(folder, devices=2)
    bench.saved = {path.name: path for path in saved.iterdir()}

    def store(event: dict[str, Any]) -> bool:
        for part in event["parts"]:
            shutil.move(part["path"], saved / part["name"])
        raise Interrupted

    def without_data(self: Reference, devices: int, batch_sizes: list[int]) -> None:
        raise DataMissing("the files are gone")

    bench.store = store
    if fails:
        Reference.facts = without_data  # type: ignore[method-assign, assignment]
    try:
        train.run(parse_spec(spec), bench)  # type: ignore[arg-type]
    except (Interrupted, JobError) as error:
        return getattr(error, "code", "interrupted")
    return "succeeded"


def test_an_attempt_that_goes_on_and_fails_at_once_says_why(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    told = []
    for fails in (False, True):
        folder = tmp_path / str(fails)
        folder.mkdir()
        told.append(call_fresh(_attempt, TEN_ROWS | {"epochs": 3}, folder, saved, fails))
    assert told == ["interrupted", "data_missing"]


def test_a_reference_for_data_parallel_takes_its_chunks_in_turn(tmp_path: Path) -> None:
    """Each with statistics of its own, of which the first device's are kept: by hand, of 5 rows over 2 devices."""
    gradient, kept = call_fresh(_chunks, tmp_path)
    assert gradient == pytest.approx(0, abs=1e-6)
    assert kept == pytest.approx(0, abs=1e-6)


def _chunks(folder: Path) -> tuple[float, float]:
    norm = {"type": "BatchNorm1d", "num_features": 3}
    fields = {"model": layers(linear(4, 3), norm, input_shape=[4]), "dataset": synthetic(5, 4, classes=3)}
    spec = parse_spec(DIGITS | fields | {"batch_size": 5, "shuffle": False})
    device = Bench.local(folder).devices[0]
    setting = Setting(spec, "single", (device,), 5, folder, (), "single")  # type: ignore[arg-type]
    reference = Reference(setting)
    reference.run(str(folder / "told.npz"), 1, "chunks", False, 2, 5)
    module = forms.plain(setting)
    x, y = reference.feed.x, reference.feed.y
    kept = []
    for chunk in (slice(0, 3), slice(3, 5)):
        loss = torch.nn.functional.cross_entropy(module(x[chunk]), y[chunk], reduction="sum") / 5
        loss.backward()  # type: ignore[no-untyped-call]
        kept.append(module.get_buffer("1.running_mean").clone())
    with np.load(folder / "told.npz") as told:
        apart = np.abs(told["gradient/0/0.weight"] - module.get_parameter("0.weight").grad.numpy()).max()
        return float(apart), float(np.abs(told["weights/1.running_mean"] - kept[0].numpy()).max())


def test_a_gradient_that_is_nothing_but_rounding_is_equal_and_proves_little(tmp_path: Path) -> None:
    """Zero weights and as many samples of each class: only the last bias has a gradient, and it cancels."""
    data = {"synthetic": {"samples": 1000, "shape": [16]}}
    fields = {"model": {"preset": "mlp", "init": "zeros"}, "dataset": data, "batch_size": 1000, "max_steps": 3}
    for optimizer in ({"name": "sgd", "lr": 0.1}, {"name": "adam", "lr": 0.001}):
        folder = tmp_path / str(optimizer["name"])
        folder.mkdir()
        more = fields | {"strategies": ["single", "scratch", "ddp"], "optimizer": optimizer}
        result = run_fresh(DIGITS | more, folder).result
        assert all_pass(result), [check for check in result.checks if not check.passed]
        assert {c.evidence["of"] for c in result.quality.codes if c.code == "weak_proof"} == {
            "single",
            "scratch",
            "ddp",
        }


def test_statistics_over_ranks_are_as_precise_in_bfloat16_as_torchs_own(tmp_path: Path) -> None:
    plain = torch.nn.BatchNorm1d(9)
    ours = forms.SynchronizedBatchNorm(torch.nn.BatchNorm1d(9), Group())
    x = (torch.randn(514, 9, generator=torch.Generator().manual_seed(0)) / 2 + 3).bfloat16()
    expected, found = plain(x), ours(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(ours.running_mean, plain.running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.running_var, plain.running_var, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_the_loss_of_an_epoch_is_that_of_its_samples_however_it_is_reduced(tmp_path: Path) -> None:
    fields = {"batch_size": 4, "loss_reduction": "sum", "optimizer": {"name": "sgd", "lr": 0}, "epochs": 1}
    result = run_fresh(TEN_ROWS | fields, tmp_path).result
    for of in TEN_ROWS["strategies"]:
        assert curve(result, "train_loss", of).y == pytest.approx([math.log(2)])


def test_what_hinders_and_what_is_missing_is_told(tmp_path: Path) -> None:
    spec = TEN_ROWS | {"strategies": ["scratch", "ddp"], "batch_size": 1, "max_steps": 2}
    codes = run_fresh(spec, tmp_path).result.quality.codes
    assert [code.evidence["of"] for code in codes if code.code == "no_baseline"] == [["scratch", "ddp"]]
    assert {code.evidence["of"] for code in codes if code.code == "idle_devices"} == {"scratch", "ddp"}


def test_the_reproduction_accumulates_and_drops_out_as_the_job_did(tmp_path: Path) -> None:
    drop = {"type": "Dropout", "p": 0.5}
    model = layers(linear(64, 32), {"type": "BatchNorm1d", "num_features": 32}, drop, linear(32, 10), input_shape=[64])
    fields = {"model": model, "gradient_accumulation": 2, "strategies": ["single"], "epochs": 1}
    outcome = run_fresh(DIGITS | fields, tmp_path)
    assert outcome.kept["data.npz"].parent == outcome.kept["reproduce.py"].parent == tmp_path
    command = [sys.executable, "-P", "reproduce.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    told = float(run.stdout.partition("loss ")[2].partition(",")[0])
    assert told == pytest.approx(curve(outcome.result, "train_loss", "single").y[0], abs=2e-4)
