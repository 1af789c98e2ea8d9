"""What is read too early, computed wrongly, left out, or lost: a failed job, never a fast one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.worker.fresh import call_fresh
from torchstone.errors import ProcessDied, WorkloadError
from torchstone.parallel import ParallelSpec
from torchstone.specs import parse_spec
from worker.bench import Bench
from worker.concurrency import copies, devices, products, schedule
from worker.concurrency.crew import Crew
from worker.concurrency.lanes import Sample
from worker.concurrency.part import Assigned, Checked, Part

SLOW_S = 0.05


def assigned(folder: Path, size: int = 64, repeats: int = 4) -> Assigned:
    spec = parse_spec({"kind": "parallel", "size": size, "repeats": repeats})
    assert isinstance(spec, ParallelSpec)
    return Assigned(spec, tuple(Bench.local(folder, devices=2).devices), size, repeats, folder)


def run_lane(make: Callable[..., Part], lane: str, told: Assigned, **more: Any) -> Sample:
    """One run of a lane, in processes of its own."""
    with Crew() as crew:
        part = make(crew, told, Checked(), **more)
        return next(each for each in part.lanes if each.name == lane).run()


class Early(copies.Copier):
    """Copies without waiting for what it copies."""

    def wait_for_next(self) -> None:
        pass


class Stale(copies.Copier):
    """Makes every copy but the last."""

    def _copy(self, i: int) -> list[float]:
        return [0.0, 0.0] if i == len(self.source) - 1 else super()._copy(i)


class Late(copies.Maker):
    """Is slow with its last product, and never tells of it before."""

    def _product(self, i: int) -> list[float]:
        if i == self.repeats - 1:
            time.sleep(SLOW_S)
        return super()._product(i)


@pytest.mark.parametrize("copier", [Early, Stale])
def test_a_copy_that_came_too_early_or_not_at_all_fails(copier: type[copies.Copier], tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="was not whole when it was read"):
        call_fresh(_overlap, copier, tmp_path)


def _overlap(copier: type[copies.Copier], folder: Path) -> None:
    with mock.patch.object(copies, "Maker", Late):
        run_lane(copies.on_cpu, "overlapped", assigned(folder), copier=copier)


def test_a_copier_that_waits_passes_however_late_the_product(tmp_path: Path) -> None:
    call_fresh(_overlap, copies.Copier, tmp_path)


class Forgetful(products.Products):
    """Leaves out a product."""

    def _product(self, i: int) -> list[float]:
        return [0.0, 0.0] if i == 2 else super()._product(i)


class Careless(products.Products):
    """Computes something else, where nobody looks."""

    def _product(self, i: int) -> list[float]:
        span = super()._product(i)
        self.results[i][-1, -1] += 0.01
        return span


@pytest.mark.parametrize("wrong", [Forgetful, Careless])
def test_a_product_that_is_missing_or_wrong_fails(wrong: type[products.Products], tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"result [13] of 4"):
        call_fresh(_concurrent, wrong, "concurrent", tmp_path)


def _concurrent(kind: type[products.Products], lane: str, folder: Path) -> Sample:
    with mock.patch.object(devices, "Products", kind):
        return run_lane(devices.on_cpu, lane, assigned(folder))


class LastIsSlow(products.Products):
    """The second device, whose seed is one higher, takes long."""

    def _product(self, i: int) -> list[float]:
        start_s, _ = super()._product(i)
        if self.seed == 1:
            time.sleep(SLOW_S)
        return [start_s, time.perf_counter()]


@pytest.mark.parametrize("lane", ["alone/1", "concurrent", "sequential"])
def test_work_on_the_last_device_is_waited_for_and_shows(lane: str, tmp_path: Path) -> None:
    sample: Sample = call_fresh(_concurrent, LastIsSlow, lane, tmp_path)
    busy_s = {piece.at["rank"]: piece.end_s - piece.start_s for piece in sample.pieces}
    assert set(busy_s) == ({1} if lane == "alone/1" else {0, 1})
    assert busy_s[1] >= 4 * SLOW_S and sample.seconds >= 4 * SLOW_S
    assert sample.seconds == max(piece.end_s for piece in sample.pieces)


def test_one_after_another_means_so_and_at_once_means_so(tmp_path: Path) -> None:
    for lane, apart in (("sequential", True), ("concurrent", False)):
        first, second = call_fresh(_concurrent, BothAreSlow, lane, tmp_path).pieces
        assert (second.start_s >= first.end_s) is apart, lane


class BothAreSlow(products.Products):
    """Takes so long that the devices must overlap if they were told at once, whatever else runs here."""

    def _product(self, i: int) -> list[float]:
        start_s, _ = super()._product(i)
        time.sleep(2 * SLOW_S)
        return [start_s, time.perf_counter()]


class Dies(copies.Maker):
    """Is killed in the middle of its work."""

    def _product(self, i: int) -> list[float]:
        if i == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._product(i)


def test_a_process_that_dies_ends_the_job_though_another_waits_for_it(tmp_path: Path) -> None:
    with pytest.raises(ProcessDied, match=r"maker: .*SIGKILL"):
        call_fresh(_dying, tmp_path)


def _dying(folder: Path) -> None:
    with mock.patch.object(copies, "Maker", Dies):
        run_lane(copies.on_cpu, "overlapped", assigned(folder))


class HastyHost(schedule.Host):
    """Sums the gradients before they are there."""

    def run(self, waits: bool = True) -> list[tuple[str, float, float]]:
        spans = super().run(waits=False)
        super().run(waits=True)
        return spans


class LazyWorker(schedule.Worker):
    """Does not take the first layer's new weights."""

    def pull(self, waits: bool = False) -> list[tuple[str, float, float]]:
        before = self.weights[0].clone()
        spans = super().pull(waits)
        self.weights[0].copy_(before)
        return spans


@pytest.mark.parametrize("wrong", [("Host", HastyHost), ("Worker", LazyWorker)])
def test_a_step_that_did_not_wait_fails(wrong: tuple[str, type], tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"by_hand: result [12] of 2"):
        call_fresh(_step, *wrong, tmp_path)


def _step(name: str, kind: type, folder: Path) -> None:
    with mock.patch.object(schedule, name, kind):
        run_lane(schedule.on_cpu, "by_hand", assigned(folder))


def test_poison_is_seen() -> None:
    expected = torch.ones(3, 3)
    results = expected.repeat(2, 1, 1)
    assert products.verified(results, expected, 1e-4) == {"wrong": None, "max_abs_error": 0.0, "compared": 2}
    assert results.isnan().all()
    assert products.verified(results, expected, 1e-4)["wrong"] == 0


def test_a_failure_is_in_the_checks_too() -> None:
    checked = Checked()
    told = {"wrong": None, "max_abs_error": 1e-6, "compared": 4}
    checked.runs("copied_whole", "pinned", [told], "float32", {})
    with pytest.raises(WorkloadError, match="result 2 of 4"):
        checked.runs("copied_whole", "pinned", [{**told, "wrong": 1, "max_abs_error": None}], "float32", {})
    [row] = checked.rows.values()
    assert not row.passed and row.max_abs_error is None and row.detail == "8 compared"
