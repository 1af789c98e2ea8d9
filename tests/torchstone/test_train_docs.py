"""docs/train.md: its specs are accepted, and it leaves out no field, strategy or optimiser's number."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torchstone.base_spec import BaseSpec
from torchstone.specs import TrainSpec, parse_spec
from torchstone.training import Adam, Augment, Sgd, Strategy

PAGE = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
SPECS = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
DATASETS = re.findall(r"^\| `(\{.*?\})` \|", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("text", SPECS)
def test_specs_are_accepted(text: str) -> None:
    assert isinstance(parse_spec(json.loads(text)), TrainSpec)


@pytest.mark.parametrize("text", DATASETS)
def test_data_sets_are_accepted(text: str) -> None:
    parse_spec({"kind": "train", "model": {"preset": "mlp"}, "dataset": json.loads(text)})


def test_nothing_is_left_out() -> None:
    own = set(TrainSpec.model_fields) - set(BaseSpec.model_fields)
    words = own | set(Sgd.model_fields) | set(Adam.model_fields) | set(Augment.model_fields) | {*Strategy}
    assert len(SPECS) == 2 and len(DATASETS) == 4
    assert {word for word in words if not re.search(rf"[`\"]{word}[`\"]", PAGE)} == set()
