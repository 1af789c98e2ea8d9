"""`make gpu-check` without a GPU: it says so; and its specs are accepted, of every kind that there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from demo.gpu_check import NO_GPU, specs
from torchstone.specs import KINDS, parse_spec
from worker.devices import _cuda_devices

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("gpus", [1, 4])
def test_every_kind_has_specs_for_any_number_of_gpus(gpus: int) -> None:
    parsed = [parse_spec(spec) for spec in specs(gpus)]
    assert {spec.kind for spec in parsed} == set(KINDS)
    assert {spec.devices.type for spec in parsed} == {"cuda"}
    assert max(spec.devices.count for spec in parsed) == gpus


def test_where_there_is_none_it_says_so_and_is_no_success() -> None:
    if _cuda_devices([0]):
        pytest.skip("there is a GPU here")
    run = subprocess.run(
        [sys.executable, "-m", "demo.gpu_check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == NO_GPU
    assert "no CUDA device" in run.stderr and run.stdout == ""
