"""Tests marked `gpu` run wherever NVML finds a device, and nowhere else; those of `fakedev` where there is a compiler.

def test_something(fakedev: Path): ...           # four simulated accelerators, for a fresh process to load
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fakedev as simulated
from worker.devices import _cuda_devices


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda_devices([0]):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(scope="session")
def fakedev() -> Path:
    """The compiled simulated accelerator; see `tests.fakedev`."""
    try:
        return simulated.build()
    except simulated.NoCompiler as missing:
        pytest.skip(str(missing))
