"""Tests marked `gpu` run wherever NVML finds a device, and nowhere else."""

from __future__ import annotations

import pytest

from worker.devices import _cuda_devices


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda_devices([0]):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
