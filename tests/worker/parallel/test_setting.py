"""The course of a training: steps, epochs and learning rates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from torchstone.specs import parse_spec
from worker.bench import LeasedDevice
from worker.parallel.pipeline import balanced
from worker.parallel.setting import Course, Setting, stream_seed


def setting(devices: int = 2, **options: Any) -> Setting:
    spec = parse_spec({"kind": "train", "model": {"preset": "mlp"}, "batch_size": 100, **options})
    leased = tuple(LeasedDevice(f"cpu:{i}", "cpu", (i,)) for i in range(devices))
    return Setting(spec, "ddp", leased, spec.batch_size, Path("unused"), (), "ddp")  # type: ignore[union-attr,arg-type]


def rates(of: Setting) -> list[float]:
    course = Course(of)
    return [of.learning_rate(step, course) for step in range(course.total_steps)]


def test_the_last_batch_may_be_short_or_left_out() -> None:
    assert Course(setting(epochs=3)).steps_per_epoch == 15  # 1442 samples
    assert Course(setting(epochs=3, drop_last=True)).steps_per_epoch == 14
    assert Course(setting(epochs=3)).total_steps == 45


def test_max_steps_cuts_the_last_epoch_short() -> None:
    course = Course(setting(epochs=10, max_steps=20))
    assert (course.total_steps, course.epochs) == (20, 2)
    assert (course.steps_in(1), course.steps_in(2)) == (15, 5)
    assert (course.is_whole(1), course.is_whole(2)) == (True, False)


@pytest.mark.parametrize(("how", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_the_learning_rate_grows_with_the_devices_only_on_request(how: str, factor: float) -> None:
    of = setting(4, lr_scaling=how, optimizer={"name": "sgd", "lr": 0.1})
    assert of.base_learning_rate == pytest.approx(0.1 * factor)


def test_warm_up_rises_to_the_full_rate() -> None:
    told = rates(setting(epochs=1, warmup_steps=4, optimizer={"name": "sgd", "lr": 0.4}))
    assert told[:6] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_a_cosine_falls_from_the_full_rate_to_almost_nothing() -> None:
    told = rates(setting(epochs=1, schedule="cosine", warmup_steps=5, optimizer={"name": "sgd", "lr": 1.0}))
    assert told[5] == 1.0
    assert told[10] == pytest.approx(0.5)
    assert told[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.9)))


def test_a_step_schedule_falls_every_so_many_epochs() -> None:
    options = {"schedule": "step", "step_epochs": 2, "step_gamma": 0.5, "optimizer": {"name": "sgd", "lr": 1.0}}
    told = rates(setting(epochs=4, **options))
    assert (told[0], told[29], told[30], told[-1]) == (1.0, 1.0, 0.5, 0.5)


def test_streams_differ_by_rank_and_seed() -> None:
    seeds = {stream_seed(seed, rank) for seed in range(50) for rank in range(50)}
    assert len(seeds) == 2500


@pytest.mark.parametrize(
    ("costs", "stages", "cuts"),
    [([1, 1, 4, 1], 2, [2]), ([5, 1, 1, 1], 2, [1]), ([1, 1, 1], 3, [1, 2]), ([3], 1, [])],
)
def test_stages_are_balanced(costs: list[float], stages: int, cuts: list[int]) -> None:
    assert balanced(costs, stages) == cuts
