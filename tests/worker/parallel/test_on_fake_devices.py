"""`scratch` on several simulated accelerators: right, in place, and waited for, which CPU devices cannot show.

On CPU devices all tensors are on one device, and an operation is done when it returns.
"""

from __future__ import annotations

import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakedev import COUNT, KIND, load
from tests.worker.fresh import call_fresh
from torchstone.results import Result
from torchstone.specs import parse_spec
from worker.bench import Bench
from worker.parallel.clock import END, SYNCED
from worker.parallel.feed import Feed
from worker.parallel.loop import Trainer
from worker.parallel.ranks import Life
from worker.parallel.scratch import Scratch, allreduce
from worker.parallel.setting import Setting
from worker.workloads import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first to ask for the device compiles it

BUSY_S = 0.2
SPEC: dict[str, Any] = {
    "kind": "train",
    "model": {
        "layers": [
            {"type": "Flatten"},
            {"type": "Linear", "in_features": 64, "out_features": 16},
            {"type": "BatchNorm1d", "num_features": 16},
            {"type": "ReLU"},
            {"type": "Linear", "in_features": 16, "out_features": 10},
        ],
        "input_shape": [1, 8, 8],
    },
    "dataset": {"name": "digits"},
    "strategies": ["single", "scratch"],
    "batch_size": 25,
    "max_steps": 26,  # ranks look at each other's losses in the 25th
}


def bench_of(folder: Path, devices: int) -> Bench:
    """A bench whose leased devices are simulated ones."""
    bench = Bench.local(folder, devices=devices)
    bench.devices = [replace(device, name=f"{KIND}:{i}", type=KIND) for i, device in enumerate(bench.devices)]
    return bench


def setting_of(folder: Path, devices: int) -> Setting:
    """`scratch` on so many of them, its data written."""
    spec: Any = parse_spec(SPEC | {"devices": {"count": devices}})
    leased = tuple(bench_of(folder, devices).devices)
    setting = Setting(spec, "scratch", leased, spec.batch_size, folder, (), "scratch")
    Feed.write(setting)
    return setting


@pytest.mark.parametrize("devices", [2, COUNT])
def test_allreduce_sums_over_devices_in_place(devices: int, fakedev: Path) -> None:
    call_fresh(_allreduce, fakedev, devices)


def _allreduce(library: Path, devices: int) -> None:
    load(library)
    torch.ops.fakedev.take(0.0, 20.0)  # copies take long: a sum that did not wait for them would show
    tensors = [torch.full((3, 2), 10.0**rank, device=f"{KIND}:{rank}") for rank in range(devices)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    allreduce(list(tensors))
    total = float(sum(10.0**rank for rank in range(devices)))
    for rank, tensor in enumerate(tensors):
        assert tensor.device == torch.device(KIND, rank) and tensor.data_ptr() == addresses[rank]
        assert tensor.tolist() == [[total] * 2] * 3, f"device {rank}"


def test_each_device_takes_its_share_of_the_batch(fakedev: Path, tmp_path: Path) -> None:
    shares, spread = call_fresh(_shares, fakedev, tmp_path)
    assert shares == {0: [7, 7], 1: [6, 6], 2: [6, 6], 3: [6, 6]}
    assert spread == 0.0


def _shares(library: Path, folder: Path) -> tuple[dict[int, list[int]], float | None]:
    """How many samples each device's model saw in two steps, on that device."""
    load(library)
    setting = setting_of(folder, COUNT)
    feed = Feed(setting, 0)
    scratch = Scratch(setting, feed)
    scratch.restart()
    seen: dict[int, list[int]] = {rank: [] for rank in range(COUNT)}
    for module in scratch.modules:
        module.register_forward_pre_hook(lambda _, inputs: seen[inputs[0].get_device()].append(len(inputs[0])))
    for batch in feed.epoch(1)[:2]:
        scratch.step(batch, 0.1)
    return seen, scratch.spread()


def test_a_job_on_all_devices_equals_one_device(fakedev: Path, tmp_path: Path) -> None:
    """The repository's own proof: one device that runs the four shares in turn."""
    result = Result.model_validate_json(call_fresh(_job, fakedev, tmp_path))
    assert result.skipped == []
    checks = [check for check in result.checks if check.of == "scratch"]
    assert {(check.name, check.at.get("what")) for check in checks} == {
        *(("equal_to_single", what) for what in ("loss", "gradient", "weights")),
        ("replicas_equal", None),
    }
    assert all(check.passed for check in checks), [check for check in checks if not check.passed]
    assert {check.at["steps"] for check in checks if check.name == "replicas_equal"} == {3, 26}
    peaks = [(figure.of, figure.value) for figure in result.figures if figure.name == "peak_bytes"]
    assert [of for of, _ in peaks] == ["single"] + ["scratch"] * COUNT, "one for each device that it has"
    assert all(peak for _, peak in peaks)


def _job(library: Path, folder: Path) -> str:
    load(library)
    more = {"devices": {"count": COUNT}, "batch_norm": "synchronized", "augment": {"crop_padding": 1, "flip": True}}
    return train.run(parse_spec(SPEC | more), bench_of(folder, COUNT)).to_json()  # type: ignore[arg-type]


def test_work_on_the_last_device_alone_is_waited_for_and_counted(fakedev: Path, tmp_path: Path) -> None:
    was_there, told = call_fresh(_last_is_busy, fakedev, tmp_path)
    assert was_there == (False, True), "it runs behind, and is over once all have settled"
    steps = told["steps"]
    assert told["seconds"] >= steps * BUSY_S
    *others, last = [[row[END] - row[SYNCED] for row in device] for device in told["marks"]]
    assert len(last) == steps and min(last) >= BUSY_S
    # Each is waited for in turn: what the last still has to do is in no other's time.
    assert max(sum(device) for device in others) < 0.5 * sum(last)


def _last_is_busy(library: Path, folder: Path) -> tuple[tuple[bool, bool], dict[str, Any]]:
    """Whether work of the last device was over before and after settling; and an epoch in which it alone is slow."""
    load(library)
    trainer = Trainer(setting_of(folder, COUNT), 0, Life(Pipe(duplex=False)[1]))
    trainer.prepare(time.perf_counter())
    scratch = trainer.strategy
    scratch.restart()
    last = scratch.replicas[-1]
    torch.ops.fakedev.busy(1000 * BUSY_S, last.device.index)
    over = torch.Event(last.device)
    over.record(torch.accelerator.current_stream(last.device))
    before = over.query()
    scratch.settle()
    was_there = before, over.query()

    update = last.update

    def slow_update(learning_rate: float) -> None:
        update(learning_rate)
        torch.ops.fakedev.busy(1000 * BUSY_S, last.device.index)

    last.update = slow_update
    return was_there, trainer.train_epoch(1, first=0, last=3)
