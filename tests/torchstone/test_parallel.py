"""The `parallel` spec: what it asks of devices and memory, and what docs/parallel.md says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from torchstone.base_spec import BaseSpec
from torchstone.errors import InvalidRequest
from torchstone.parallel import ParallelSpec, Part
from torchstone.specs import EXAMPLES, parse_spec

PAGE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
SPECS = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)


def parallel(**fields: Any) -> ParallelSpec:
    spec = parse_spec({"kind": "parallel", **fields})
    assert isinstance(spec, ParallelSpec)
    return spec


def test_the_book_s_sizes_are_the_defaults() -> None:
    spec = parallel()
    assert (spec.size, spec.repeats, spec.devices.count, spec.parts) == (4000, 50, 2, list(Part))


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"devices": {"type": "cpu"}}, 2),
        ({"parts": ["overlap", "streams"]}, 1),
        ({"parts": ["overlap", "streams"], "devices": {"type": "cpu"}}, 1),
        ({"parts": ["streams", "schedule"]}, 2),
        ({"parts": ["concurrency"], "devices": {"count": 4}}, 4),
    ],
)
def test_without_a_count_there_are_as_many_devices_as_the_parts_need(fields: dict[str, Any], count: int) -> None:
    assert parallel(**fields).devices.count == count


@pytest.mark.parametrize(
    ("fields", "named", "rest"),
    [
        ({}, "concurrency and schedule", '"overlap", "streams"'),
        ({"parts": ["concurrency"]}, "concurrency", '"overlap", "streams"'),
        ({"parts": ["schedule", "overlap"]}, "schedule", '"overlap"'),
    ],
)
def test_one_device_is_refused_with_what_to_do(fields: dict[str, Any], named: str, rest: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parallel(devices={"count": 1}, **fields)
    [error] = refused.value.errors
    assert error["pointer"] == "/devices/count"
    assert f"two devices are needed by {named}" in error["detail"]
    assert f'"parts": [{rest}]' in error["detail"] and '"devices": {"count": 2}' in error["detail"]


def test_faults_point_at_what_was_written() -> None:
    for fields, pointer in (
        ({"parts": ["overlap", "overlap"]}, "/parts"),
        ({"parts": ["overlaps"]}, "/parts/0"),
        ({"parts": "overlap"}, "/parts"),
        ({"devices": 2}, "/devices"),
        ({"devices": {"count": "2"}}, "/devices/count"),
        ({"size": 7}, "/size"),
        ({"repeat": 3}, "/repeat"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            parallel(**fields)
        assert refused.value.errors[0]["pointer"] == pointer


def test_what_is_held_is_counted() -> None:
    held = 50 * 4000 * 4000 * 4
    assert held == 3.2e9
    one, two = (parallel(parts=["concurrency"], devices={"count": count}).memory_bytes for count in (2, 4))
    assert 2 * held <= one < 2.2 * held and two == 2 * one
    assert 2 * held <= parallel(parts=["overlap"]).memory_bytes < 2.2 * held
    assert parallel(parts=["overlap"], dtype="float64").memory_bytes == 2 * parallel(parts=["overlap"]).memory_bytes
    assert parallel(parts=["overlap"], repeats=1).memory_bytes < held / 5


def test_the_example_is_small_and_has_every_part() -> None:
    spec = parse_spec(EXAMPLES["parallel"])
    assert isinstance(spec, ParallelSpec)
    assert set(spec.parts) == set(Part) and spec.budget_s <= 10


@pytest.mark.parametrize("text", SPECS)
def test_specs_in_the_docs_are_accepted(text: str) -> None:
    assert isinstance(parse_spec(json.loads(text)), ParallelSpec)


def test_the_docs_leave_no_field_and_no_part_out() -> None:
    words = set(ParallelSpec.model_fields) - set(BaseSpec.model_fields) | {*Part}
    assert len(SPECS) >= 2
    assert {word for word in words if not re.search(rf"[`\"]{word}[`\"]", PAGE)} == set()
