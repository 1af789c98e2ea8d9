"""What an `async` spec takes, what it is told by default, and how much memory it needs; its page of documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from torchstone.asynchrony import AsyncSpec, Part
from torchstone.base_spec import BaseSpec
from torchstone.errors import InvalidRequest
from torchstone.specs import EXAMPLES, parse_spec

PAGE = (Path(__file__).parents[2] / "docs" / "async.md").read_text(encoding="utf-8")
SPECS = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)


def asynchronous(**fields: Any) -> AsyncSpec:
    spec = parse_spec({"kind": "async", **fields})
    assert isinstance(spec, AsyncSpec)
    return spec


def test_the_defaults_are_the_chapters() -> None:
    spec = asynchronous()
    assert (spec.size, spec.repeats, spec.dtype) == (1000, 10, "float32")
    assert spec.parts == list(Part) == ["numpy_vs_torch", "dispatch", "barriers", "graph"]
    assert spec.devices.count == 1 and spec.calls is None


def test_the_example_names_every_part() -> None:
    assert asynchronous(**{k: v for k, v in EXAMPLES["async"].items() if k != "kind"}).parts == list(Part)


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"parts": []}, "/parts"),
        ({"parts": ["graph", "graph"]}, "/parts"),
        ({"parts": ["graphs"]}, "/parts/0"),
        ({"size": 0}, "/size"),
        ({"dtype": "bfloat16"}, "/dtype"),
        ({"budget_s": 0}, "/budget_s"),
        ({"sizes": 3}, "/sizes"),
    ],
)
def test_a_wrong_field_is_pointed_at(fields: dict[str, Any], pointer: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asynchronous(**fields)
    assert [fault["pointer"] for fault in refused.value.errors] == [pointer]


def test_memory_grows_with_the_matrices_that_a_part_holds() -> None:
    one = 1000 * 1000 * 4
    assert asynchronous().memory_bytes == 12 * one
    assert asynchronous(dtype="float64").memory_bytes == 24 * one
    assert asynchronous(parts=["dispatch", "graph"]).memory_bytes == 3 * one
    assert asynchronous(parts=["graph"], size=60_000).memory_bytes == 0, "its matrices are small whatever the size"


@pytest.mark.parametrize("text", SPECS)
def test_the_specs_of_the_page_are_accepted(text: str) -> None:
    assert isinstance(parse_spec(json.loads(text)), AsyncSpec)


def test_the_page_leaves_out_no_field_and_no_part() -> None:
    words = set(AsyncSpec.model_fields) - set(BaseSpec.model_fields) | set(Part)
    assert len(SPECS) >= 2
    assert {word for word in words if not re.search(rf"[`\"]{word}[`\"]", PAGE)} == set()
