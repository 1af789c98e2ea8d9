"""Lanes against the host's ceilings: which work, on how many cores, and a reason where nothing is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchstone.ceilings import Ceilings
from torchstone.parallel import ParallelSpec
from torchstone.results import Figure
from torchstone.specs import parse_spec
from worker.bench import LeasedDevice
from worker.concurrency.ceilings import against_ceilings
from worker.concurrency.lanes import Lane, Sample
from worker.concurrency.part import Assigned, Checked, Part
from worker.concurrency.products import work_of
from worker.measure.race import Record

SIZE, REPEATS = 100, 10
ONE_CORE = {"FLOP/s": 1e9, "B/s": 2e9}


def ceilings(*cores: int) -> Ceilings:
    """Of a host on which two cores reach twice what one does."""
    rows: list[dict[str, Any]] = []
    for count in cores:
        at: dict[str, Any] = {"cores": count}
        rows.append({"of": "memory", "name": "stream_copy", "at": at, "value": count * 2e9, "unit": "B/s"})
        at = {**at, "dtype": "float32", "device_type": "cpu"}
        rows.append({"of": "gemm", "name": "gemm", "at": at, "value": count * 1e9, "unit": "FLOP/s"})
    return Ceilings({"ceilings": [{**row, "job": "j", "grade": "valid"} for row in rows]})


def points(known: Ceilings, *cores: tuple[int, ...], kind: str = "cpu") -> dict[str, Figure]:
    """Of lanes that all take one second, on devices with these cores."""
    devices = tuple(LeasedDevice(f"{kind}:{i}", kind, each) for i, each in enumerate(cores))
    spec = parse_spec({"kind": "parallel", "size": SIZE, "repeats": REPEATS})
    assert isinstance(spec, ParallelSpec)
    every = tuple(range(len(devices)))
    lanes = [
        Lane(name, lambda: Sample(1.0, []), "compute", name, work=work_of(SIZE, "float32", *counts), ranks=ranks)
        for name, counts, ranks in (
            ("alone", (REPEATS, 0), (0,)),
            ("sequential", (REPEATS * len(every), 0), every),
            ("sequential_again", (REPEATS * len(every), 0), every),
            ("copy", (0, REPEATS), (every[-1],)),
        )
    ]
    lanes.append(Lane("step", lambda: Sample(1.0, []), "both", "step"))
    part = Part("concurrency", {}, lanes, "sequential", [], Checked())
    record = Record(seconds={lane.name: np.ones(8) for lane in lanes})
    assigned = Assigned(spec, devices, SIZE, REPEATS, Path())
    return {f.of: f for f in against_ceilings(part, record, assigned, known)}


def test_a_lane_is_set_against_the_cores_of_its_devices() -> None:
    found = points(ceilings(1, 2), (0,), (1,))
    assert {of: f.name for of, f in found.items()} == {
        "alone": "roofline",
        "sequential": "roofline",
        "copy": "memory_fraction",
    }, "no twin, and nothing without work"
    one = 2 * SIZE**3 * REPEATS
    assert found["alone"].value == pytest.approx(one / ONE_CORE["FLOP/s"])
    assert found["sequential"].value == pytest.approx(found["alone"].value), "twice the work on twice the cores"
    assert (found["alone"].model_extra or {})["flop"] == one
    assert (found["alone"].model_extra or {})["bytes"] == 3 * SIZE**2 * 4 * REPEATS
    assert found["copy"].value == pytest.approx(2 * SIZE**2 * 4 * REPEATS / ONE_CORE["B/s"])
    assert all(f.reason is None and (f.model_extra or {})["ceiling_job"] == "j" for f in found.values())


def test_a_copy_faster_than_memory_says_why() -> None:
    slow = {"of": "memory", "name": "stream_copy", "at": {"cores": 1}, "value": 1.0, "unit": "B/s"}
    found = points(Ceilings({"ceilings": [{**slow, "job": "j", "grade": "valid"}]}), (0,), (1,))
    assert found["copy"].value and found["copy"].value > 1
    assert "caches" in (found["copy"].model_extra or {})["note"]


def test_devices_that_share_cores_are_no_more_cores_than_those() -> None:
    shared, apart = points(ceilings(1, 2), (0,), (0,)), points(ceilings(1, 2), (0,), (1,))
    assert shared["alone"].value == apart["alone"].value
    assert shared["sequential"].value == pytest.approx(2 * (apart["sequential"].value or 0))


@pytest.mark.parametrize(
    ("known", "cores", "kind", "lacking", "reason"),
    [
        (Ceilings(None), ((0,), (1,)), "cpu", {"alone", "sequential", "copy"}, "no hardware report"),
        (ceilings(1), ((0,), (1,)), "cpu", {"sequential"}, "no gemm figure in float32 for cpu with 2 cores"),
        (ceilings(1), ((0,), (1,)), "cuda", {"copy"}, "the link between host and device"),
    ],
    ids=["no report", "not of so many cores", "to another memory"],
)
def test_where_no_ceiling_is_known_the_value_is_null_and_says_why(
    known: Ceilings, cores: tuple[tuple[int, ...], ...], kind: str, lacking: set[str], reason: str
) -> None:
    found = points(known, *cores, kind=kind)
    for of in lacking:
        told = found[of]
        assert told.value is None and reason in str(told.reason)
        assert (told.model_extra or {})["bytes_per_s"] > 0, "what was reached is told all the same"
    if kind == "cpu":
        assert all((f.value is None) == (of in lacking) for of, f in found.items())
