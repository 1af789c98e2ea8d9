"""docs/jit.md: its specs are accepted, and its tables name every field, variant and code there is, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torchstone.layers import LAYERS
from torchstone.specs import JitSpec, Variant, parse_spec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "jit.md").read_text(encoding="utf-8")
SPECS = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
CODED = ("measure/quality.py", "measure/heat.py", "workloads/jit.py")
"""Where in worker/ the codes of a `jit` job are made; `neighbours` is the worker's own, in run.py."""


def table(heading: str) -> list[list[str]]:
    """The rows, cell by cell, of the page's first table whose heading begins with this word."""
    lines = iter(PAGE.splitlines())
    next(line for line in lines if line.startswith(f"| {heading} |"))
    next(lines)
    rows = []
    while (line := next(lines)).startswith("|"):
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def names(heading: str) -> list[str]:
    """All that stands in backticks in the first column."""
    return [name for row in table(heading) for name in re.findall(r"`(\w+)`", row[0])]


def test_every_layer_is_listed() -> None:
    listed = PAGE.partition("Which layers there are")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == {*LAYERS}


@pytest.mark.parametrize("text", SPECS)
def test_specs_are_accepted(text: str) -> None:
    assert isinstance(parse_spec(json.loads(text)), JitSpec)


def test_the_first_spec_is_the_default() -> None:
    assert len(SPECS) == 4
    assert parse_spec(json.loads(SPECS[0])) == parse_spec({"kind": "jit", "model": {"preset": "mlp"}})


def test_every_field_is_named_once_with_its_default() -> None:
    told = {row[0].strip("`"): row[1] for row in table("Field")}
    assert sorted(names("Field")) == sorted(JitSpec.model_fields) == sorted(told)
    assert [name for name, default in told.items() if default == "required"] == ["kind", "model"]
    spec = parse_spec({"kind": "jit", "model": {"preset": "mlp"}}).model_dump(mode="json")
    optional = {name: json.loads(default.strip("`")) for name, default in told.items() if default != "required"}
    assert optional == {name: spec[name] for name in optional}


def test_every_variant_is_named_once() -> None:
    assert sorted(names("Variant")) == sorted(Variant)


def test_every_code_is_named_once() -> None:
    source = "".join((ROOT / "worker" / file).read_text(encoding="utf-8") for file in CODED)
    made = set(re.findall(r"code=\"(\w+)\"", source)) | {"neighbours"}
    assert sorted(names("Code")) == sorted(made)
