"""What a host has: how cores become devices, what a container's limits leave, and what names are refused."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstone.errors import SetupError
from torchstone.settings import Settings
from worker.devices import cpu_devices, cuda_devices, discover, memory_limit_bytes, parse_cpulist, usable_cores


@given(cores=st.sets(st.integers(0, 300), min_size=1, max_size=64), data=st.data())
def test_groups_are_disjoint_cover_all_cores_and_differ_by_one_core_at_most(
    cores: set[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(cores)))
    devices = cpu_devices(sorted(cores), count, [])
    assert [device.name for device in devices] == [f"cpu:{i}" for i in range(count)]
    assert sorted(core for device in devices for core in device.cores) == sorted(cores)
    sizes = [len(device.cores) for device in devices]
    assert max(sizes) - min(sizes) <= 1


def test_by_default_a_group_is_a_numa_node_and_there_are_two_where_there_are_two_cores() -> None:
    assert [d.cores for d in cpu_devices([0, 1, 2, 3], None, [[0, 2], [1, 3]])] == [(0, 2), (1, 3)]
    assert [d.cores for d in cpu_devices([0, 1], None, [[0, 1]])] == [(0,), (1,)]
    assert [d.cores for d in cpu_devices([5], None, [[0, 1, 2, 3, 4, 5]])] == [(5,)]


def test_more_groups_than_cores_is_refused() -> None:
    with pytest.raises(SetupError, match="3 CPU devices asked for, but only 2 cores"):
        cpu_devices([0, 1], 3, [])


@pytest.mark.parametrize(("text", "cores"), [("", []), ("0", [0]), ("0-3,8,10-11", [0, 1, 2, 3, 8, 10, 11])])
def test_cpulists_read_as_the_kernel_writes_them(text: str, cores: list[int]) -> None:
    assert parse_cpulist(text) == cores


def test_this_host_owns_cores_that_this_process_may_use(tmp_path: Path) -> None:
    devices = discover(Settings(data=tmp_path, cpu_devices=1))
    assert [device.name for device in devices] == ["cpu:0"]
    assert set(devices[0].cores) == set(usable_cores()) <= os.sched_getaffinity(0)


def test_named_devices_are_chosen_and_unknown_names_refused(tmp_path: Path) -> None:
    assert [d.name for d in discover(Settings(data=tmp_path, devices="cpu:0"))] == ["cpu:0"]
    with pytest.raises(SetupError, match=r"'cpu:99' is not on this host; it has: .*cpu:0"):
        discover(Settings(data=tmp_path, devices="cpu:0,cpu:99"))
    with pytest.raises(SetupError, match="named twice"):
        discover(Settings(data=tmp_path, devices="cpu:0, cpu:0"))


def test_the_memory_limit_is_the_setting_or_less_than_all_there_is(tmp_path: Path) -> None:
    assert memory_limit_bytes(Settings(data=tmp_path, memory_limit_bytes=1 << 30)) == 1 << 30
    assert 0 < memory_limit_bytes(Settings(data=tmp_path)) < psutil.virtual_memory().total


def test_a_gpu_has_the_same_name_whatever_else_is_visible() -> None:
    """Two workers on a machine, each given one of its GPUs, must not take the same name for different ones."""
    found = [{"uuid": f"GPU-{word}", "description": "", "memory_bytes": None} for word in ("aaaa", "bbbb", "cccc")]
    seen = {
        visible: [(d.name, d.uuid, d.cores) for d in cuda_devices(found, [0, 1], visible)]
        for visible in ("1", "GPU-bbbb", "2,1", "", "-1")
    }
    assert seen["1"] == seen["GPU-bbbb"] == [("cuda:1", "GPU-bbbb", (0, 1))]
    assert seen["2,1"] == [("cuda:1", "GPU-bbbb", (0,)), ("cuda:2", "GPU-cccc", (1,))]
    assert seen[""] == seen["-1"] == []
    assert [d.name for d in cuda_devices(found, [0, 1], None)] == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.gpu
def test_cuda_devices_are_found_with_their_uuids(tmp_path: Path) -> None:
    devices = discover(Settings(data=tmp_path))
    assert devices and all(d.type == "cuda" and d.uuid and d.uuid.startswith(("GPU-", "MIG-")) for d in devices)
    assert [d.name for d in devices] == [f"cuda:{i}" for i in range(len(devices))]
