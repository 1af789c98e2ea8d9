"""Strategies with a process per device, on simulated accelerators: equal to one device, nothing read too early.

CPU devices cannot show that: there an operation is done when it returns, and a sum when it was waited for. Here what is
sent between processes is read late and written late, by streams that nobody's host waits for, as with NCCL. `replicate`
cannot run here: torch has its scatter and gather for CUDA alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fakedev import load
from tests.worker.fresh import call_fresh
from tests.worker.parallel.test_on_fake_devices import SPEC, bench_of
from torchstone.results import Result
from torchstone.specs import parse_spec
from worker.bench import Bench, LeasedDevice
from worker.parallel.ddp import Ddp
from worker.parallel.pipeline import Pipeline
from worker.parallel.single import Single
from worker.workloads import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first to ask for the device compiles it

STEPS = 6
BUSY_MS, LINK_MS = 60.0, 30.0
LAYERS = [
    {"type": "Flatten"},
    {"type": "Linear", "in_features": 64, "out_features": 32},
    {"type": "BatchNorm1d", "num_features": 32},
    {"type": "Linear", "in_features": 32, "out_features": 16},
    {"type": "ReLU"},
    {"type": "Linear", "in_features": 16, "out_features": 10},
]


def job(library: Path, folder: Path, strategies: list[str], devices: int, link_ms: float, plant: Any) -> str:
    """The result of a job on so many of the devices, after `plant()` has changed this process and so the ranks."""
    load(library)
    torch.ops.fakedev.take(0.0, 0.0, link_ms)
    plant()
    more = {
        "model": {"layers": LAYERS, "input_shape": [1, 8, 8]},
        "strategies": ["single", *strategies],
        "devices": {"count": devices},
        "max_steps": STEPS,
    }
    return train.run(parse_spec(SPEC | more), bench_of(folder, devices)).to_json()  # type: ignore[arg-type]


def as_it_is() -> None:
    """Nothing is changed."""


def result_of(
    fakedev: Path, folder: Path, strategies: list[str], devices: int = 2, link_ms: float = 2.0, plant: Any = as_it_is
) -> Result:
    return Result.model_validate_json(call_fresh(job, fakedev, folder, strategies, devices, link_ms, plant))


@pytest.mark.parametrize(
    ("devices", "strategies"),
    [(2, ["ddp", "fsdp", "tensor", "pipeline", "parameter_server"]), (4, ["ddp", "tensor", "pipeline"])],
)
def test_what_several_devices_compute_is_what_one_computes(
    devices: int, strategies: list[str], fakedev: Path, tmp_path: Path
) -> None:
    result = result_of(fakedev, tmp_path, strategies, devices)
    assert_equal(result, strategies)
    for strategy in strategies:
        peaks = [figure.value for figure in result.figures if (figure.name, figure.of) == ("peak_bytes", strategy)]
        assert len(peaks) == devices and all(peaks), (strategy, peaks)
        spent = [f.value for f in result.figures if f.of == strategy and f.name.startswith("step_") and "rank" in f.at]
        assert len(spent) == (0 if strategy == "fsdp" else 4 * devices), strategy
        assert all(value is not None and value >= 0 for value in spent), (strategy, spent)


def assert_equal(result: Result, strategies: list[str]) -> None:
    """All strategies that were asked for ran, and were proven to compute the same as one device."""
    assert result.skipped == [] and all(check.passed for check in result.checks), result.checks
    proven = {check.of for check in result.checks if check.name == "equal_to_single"}
    assert proven - {"single"} == set(strategies)


def waits_for_nothing_received() -> None:
    """A pipeline whose stages go on with what they have asked for as if it was there."""

    def receive(self: Pipeline, shape: Any, source: int) -> torch.Tensor:
        tensor = torch.zeros(shape, device=self.device)
        dist.irecv(tensor, source)
        return tensor

    Pipeline._receive = receive  # type: ignore[method-assign]


def waits_for_no_sum() -> None:
    """A hook that gives back its bucket as soon as the sum was begun."""

    def begin_sum(self: Ddp, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer(), async_op=True)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().clone())
        return future

    Ddp._sum = begin_sum  # type: ignore[method-assign]


@pytest.mark.parametrize(("strategy", "plant"), [("pipeline", waits_for_nothing_received), ("ddp", waits_for_no_sum)])
def test_what_is_read_before_it_is_there_is_noticed(strategy: str, plant: Any, fakedev: Path, tmp_path: Path) -> None:
    result = result_of(fakedev, tmp_path, [strategy], link_ms=LINK_MS, plant=plant)
    checks = [check for check in result.checks if check.of == strategy and check.name == "equal_to_single"]
    assert checks and not all(check.passed for check in checks)
    (efficiency,) = (f for f in result.figures if (f.name, f.of) == ("scaling_efficiency", strategy))
    assert efficiency.value is None and efficiency.reason


def second_rank_is_slow() -> None:
    """Its device is kept busy in each forward pass; its host is not."""
    loss_of = Single.loss_of

    def slow(self: Single, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            torch.ops.fakedev.busy(BUSY_MS, self.device.index)
        return loss_of(self, x, y)

    Single.loss_of = slow  # type: ignore[method-assign]


def test_where_the_time_of_a_step_went_is_what_the_devices_did(fakedev: Path, tmp_path: Path) -> None:
    """One device computes for long, the other waits for it, and then both for the link."""
    result = result_of(fakedev, tmp_path, ["ddp"], link_ms=LINK_MS, plant=second_rank_is_slow)
    spent = {
        (figure.name, figure.at["rank"]): 1000 * (figure.value or 0)
        for figure in result.figures
        if figure.of == "ddp" and figure.name.startswith("step_") and "rank" in figure.at
    }
    assert spent["step_compute_s", 1] >= BUSY_MS
    assert spent["step_wait_s", 0] >= BUSY_MS / 2 > spent["step_wait_s", 1]
    assert min(spent["step_communication_s", rank] for rank in (0, 1)) >= LINK_MS / 2
    assert spent["step_compute_s", 0] < BUSY_MS, "what it waits for is no work of its own"


def two_share_one(library: Path, folder: Path) -> str:
    load(library)
    return on_one_device(folder, bench_of(folder, 1).devices[0], ["ddp", "pipeline"])


def on_one_gpu(folder: Path) -> str:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    # NCCL refuses two ranks on one GPU. Gloo takes them, and of the operations on GPUs it has what these two need.
    dist.Backend.default_device_backend_map["cuda"] = "gloo"
    return on_one_device(folder, LeasedDevice("cuda:0", "cuda", cores), ["ddp", "tensor"])


def on_one_device(folder: Path, device: LeasedDevice, strategies: list[str]) -> str:
    """The result of a job that holds this device twice."""
    bench = Bench("local", 1, "localhost", [device, device], folder)
    more = {"model": {"layers": LAYERS, "input_shape": [1, 8, 8]}, "strategies": ["single", *strategies]}
    spec = parse_spec(SPEC | more | {"devices": {"count": 2}, "max_steps": STEPS})
    return train.run(spec, bench).to_json()  # type: ignore[arg-type]


def test_two_ranks_on_one_simulated_device(fakedev: Path, tmp_path: Path) -> None:
    assert_equal(Result.model_validate_json(call_fresh(two_share_one, fakedev, tmp_path)), ["ddp", "pipeline"])


@pytest.mark.gpu
def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    assert_equal(Result.model_validate_json(call_fresh(on_one_gpu, tmp_path)), ["ddp", "tensor"])
