"""docs/hardware.md: its specs are accepted, and it leaves out no field and no probe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torchstone.base_spec import BaseSpec
from torchstone.specs import HardwareSpec, Probe, parse_spec

PAGE = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
SPECS = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("text", SPECS, ids=["all", "some"])
def test_specs_are_accepted(text: str) -> None:
    assert isinstance(parse_spec(json.loads(text)), HardwareSpec)


def test_nothing_is_left_out() -> None:
    words = (set(HardwareSpec.model_fields) - set(BaseSpec.model_fields)) | {*Probe}
    assert {word for word in words if f"`{word}`" not in PAGE and f'"{word}"' not in PAGE} == set()
