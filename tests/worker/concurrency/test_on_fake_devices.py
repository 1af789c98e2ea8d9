"""What is queued on several accelerators, on simulated ones: in order, at once, waited for, and read when it is there.

A simulated product or copy lasts as long as a test tells it to, asleep, whatever else the machine does.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.fakedev import COUNT, KIND, load
from tests.worker.fresh import call_fresh
from worker.concurrency import cuda, cuda_step
from worker.concurrency.cuda import GpuCopies, GpuProducts
from worker.concurrency.cuda_step import GpuStep
from worker.concurrency.step import DEVICES, Step
from worker.concurrency.streams import ONE, SMALL_COUNT, StreamRunner, Work

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first to ask for the devices compiles them

LASTS_MS = 25.0
REPEATS = 6
WAYS = ["in_order", "by_hand", "by_backend"]


def event_on_idle_stream(kind: str, rank: int, stream: Any = None) -> Any:
    """In place of `event`: recorded where nothing is under way, so that whoever waits for it comes too early."""
    made = torch.Event(torch.device(kind, rank), enable_timing=True)
    made.record(torch.Stream(torch.device(kind, rank)))
    made.synchronize()
    return made


def without_events(early: bool) -> Any:
    """Where `early`, no event guards anything."""
    if not early:
        return nullcontext()
    return mock.patch.multiple(cuda, event=event_on_idle_stream)


def test_work_on_the_last_device_alone_is_waited_for(fakedev: Path) -> None:
    sample, found = call_fresh(_products, fakedev, [COUNT - 1], True)
    assert [told["where"] for told in found] == [f"{KIND}:{COUNT - 1}"] and found[0]["wrong"] is None
    ((rank, start_s, end_s),) = sample["spans"]
    assert rank == COUNT - 1 and sample["seconds"] >= end_s - start_s >= REPEATS * LASTS_MS * 1e-3


def test_devices_work_at_once_or_one_after_another_as_told(fakedev: Path) -> None:
    every = list(range(COUNT))
    (at_once, found), (in_turn, found_in_turn) = (call_fresh(_products, fakedev, every, both) for both in (True, False))
    assert [told["wrong"] for told in found + found_in_turn] == [None] * 2 * COUNT
    assert at_once["seconds"] < 0.6 * in_turn["seconds"], "a quarter, but for what disturbs the machine"


def _products(library: Path, ranks: list[int], at_once: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    load(library)
    gpus = GpuProducts(16, REPEATS, "float32", 0, COUNT, KIND)
    gpus.prepare()
    torch.ops.fakedev.take(LASTS_MS, 0.0)
    return gpus.run(ranks, at_once, streams=1), gpus.verify(ranks)


@pytest.mark.parametrize("direction", ["device_to_host", "host_to_device"])
def test_only_copies_into_pinned_memory_hide_behind_products(direction: str, fakedev: Path) -> None:
    for how, hides in (("serial", False), ("pageable", False), ("pinned", True)):
        spans, found = call_fresh(_copies, fakedev, direction, how, False)
        assert [told["wrong"] for told in found.values()] == [None, None]
        times = {kind: [(start, end) for name, start, end in spans if name == kind] for kind in ("compute", "copy")}
        first, second = ("compute", "copy") if direction == "device_to_host" else ("copy", "compute")
        # Each needs what the other made of the same number; hidden: it does not need to wait for all of them.
        for (_, made_s), (used_s, _) in zip(times[first], times[second], strict=True):
            assert used_s >= made_s
        assert (times[second][0][0] < times[first][-1][0]) is hides, how


@pytest.mark.parametrize(
    ("direction", "row"), [("device_to_host", "copied_whole"), ("host_to_device", "computed_whole")]
)
def test_what_is_read_before_it_is_there_is_noticed(direction: str, row: str, fakedev: Path) -> None:
    """Copies of products that are not there yet, or products of copies that are not."""
    _, found = call_fresh(_copies, fakedev, direction, "pinned", True)
    assert found[row]["wrong"] == 0
    (other,) = (told for name, told in found.items() if name != row)
    assert other["wrong"] is None, "what did not have to wait is right"


def _copies(library: Path, direction: str, how: str, early: bool) -> tuple[list[Any], dict[str, Any]]:
    load(library)
    copies = GpuCopies(16, REPEATS, "float32", 0, direction, KIND)
    copies.prepare()
    torch.ops.fakedev.take(LASTS_MS, LASTS_MS)
    with without_events(early):
        spans = copies.run("both", how)["spans"]
    torch.ops.fakedev.take(0.0, 0.0)
    return spans, copies.verify("both")


@pytest.mark.parametrize("way", WAYS)
def test_a_step_on_two_devices_and_the_host_is_right(way: str, fakedev: Path) -> None:
    spans, found = call_fresh(_step, fakedev, way, False)
    assert [told["wrong"] for told in found] == [None] * DEVICES
    assert {rank for rank, *_ in spans} == {None, *range(DEVICES)}


def test_a_host_that_does_not_wait_for_the_gradients_is_noticed(fakedev: Path) -> None:
    _, found = call_fresh(_step, fakedev, "by_hand", True)
    assert all(told["wrong"] is not None for told in found)


def _step(library: Path, way: str, early: bool) -> tuple[list[Any], list[dict[str, Any]]]:
    load(library)
    step = GpuStep(Step(32, "float32", 0), KIND)
    step.prepare()
    torch.ops.fakedev.take(0.0, LASTS_MS)
    with without_events(early), mock.patch.object(cuda_step, "event", event_on_idle_stream if early else cuda.event):
        spans = step.run(way)["spans"]
    torch.ops.fakedev.take(0.0, 0.0)
    return spans, step.verify()


def test_streams_of_one_device_work_side_by_side(fakedev: Path) -> None:
    one, side_by_side = (call_fresh(_streams, fakedev, way) for way in (ONE, "streams"))
    assert one[1]["wrong"] is None and side_by_side[1]["wrong"] is None
    assert one[1]["compared"] == SMALL_COUNT
    assert side_by_side[0] < 0.6 * one[0], "a quarter, but for what disturbs the machine"


def _streams(library: Path, way: str) -> tuple[float, dict[str, Any]]:
    load(library)
    runner = StreamRunner(Work(64, "float32", 0, 4, KIND), way)
    runner.prepare()
    torch.ops.fakedev.take(LASTS_MS / 4, 0.0)
    seconds, _ = runner.turn("small", calls=1, settle_s=0.0, call_s=1.0)
    return seconds, runner.verify("small")
