"""The C kernels: they compute what they say, and where no compiler is, that is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from worker.hardware import native
from worker.hardware.memory import chase
from worker.hardware.native import Kernels, Missing
from worker.hardware.places import caches, memory, random_cycle
from worker.hardware.vector import polynomial


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    found = native.load(scratch=tmp_path_factory.mktemp("kernels"))
    if isinstance(found, Missing):
        assert "no C compiler" in found.reason, found.reason  # one that is there and fails is a fault of the kernels
        pytest.skip(found.reason)
    return found


def test_reads_see_every_word_in_either_direction(kernels: Kernels) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 62, 4096, dtype=np.uint64)
    total = int(words.sum())
    for seconds, found in (kernels.read_all(words, 2), kernels.read_backwards(words)):
        assert found == total and seconds > 0
    places = np.array([0, 512, 8], dtype=np.uint64)
    _, found = kernels.read_bursts(words, places, 16)
    assert found == sum(int(words[int(place) : int(place) + 16].sum()) for place in places) % 2**64


def test_the_cycle_visits_every_line_once_and_the_chase_closes_it(kernels: Kernels) -> None:
    cycle = random_cycle(64 * 100, seed=1)  # no multiple of the eight steps of the kernel's loop
    place, visited = 0, []
    for _ in range(100):
        visited.append(place)
        place = int(cycle[place])
    assert place == 0 and sorted(visited) == list(range(0, 800, 8)) and visited != sorted(visited)
    took, steps, closed = chase(kernels, cycle, budget_s=0.001)
    assert closed and steps % 8 == 0 and len(took.seconds) == 12


def test_a_cycle_that_leaves_lines_out_is_found(kernels: Kernels) -> None:
    halves = np.zeros(8 * 96, dtype=np.uint64)
    for first in (0, 48):  # each half a cycle of its own: after 96 steps from 0 one is back there all the same
        lines = np.arange(first, first + 48) * 8
        halves[lines] = np.roll(lines, -1)
    assert kernels.walk(halves, 96)[0] == 0
    assert not chase(kernels, halves, budget_s=0.001)[2]


def test_stream_computes_what_it_should_on_several_threads(kernels: Kernels) -> None:
    a, b, c = (memory(1024) for _ in range(3))
    for array, value in ((a, 1.0), (b, 2.0), (c, 0.0)):
        kernels.fill(array, value)
    begun, ended = kernels.stream(a, b, c, 2, 1, np.zeros(1, dtype=np.int64))
    assert (ended >= begun).all() and begun.shape == (2, 4)
    assert set(a) == {225.0} and set(b) == {45.0} and set(c) == {60.0}  # by hand: two rounds of STREAM from 1, 2, 0


def test_arithmetic_branches_and_polynomials(kernels: Kernels) -> None:
    assert kernels.fma_chain(100)[1] == 2.0
    choices = np.array([0, 1, 1, 0, 1], dtype=np.uint8)
    assert kernels.branches(choices)[1] == 3
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    y = np.zeros_like(x)
    assert kernels.horner(x, y, 1) > 0
    np.testing.assert_allclose(y, polynomial(x.astype(np.float64)), atol=1e-5)


def test_a_library_is_compiled_once_for_the_same_flags(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert isinstance(native.load(("-O1",)), Kernels)
    folder = tmp_path / "torchstone" / "kernels"
    [first] = folder.iterdir()
    made = first.stat().st_mtime_ns
    assert isinstance(native.load(("-O1",)), Kernels)
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == [made]
    assert isinstance(native.load(("-O2",)), Kernels)
    assert len(list(folder.iterdir())) == 2


def test_without_a_compiler_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    found = native.load()
    assert isinstance(found, Missing) and "no C compiler" in found.reason and "install" in found.reason


def test_a_compiler_that_fails_is_quoted(kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = native.load(("-no-such-flag",))
    assert isinstance(found, Missing) and "no-such-flag" in found.reason
    assert list((tmp_path / "torchstone" / "kernels").iterdir()) == []


def test_caches_are_read_as_sysfs_tells_them(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate(
        [(1, "Data", "48K"), (1, "Instruction", "32K"), (3, "Unified", "2M"), (2, "Unified", "?")]
    ):
        folder = tmp_path / "cpu0" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        told = {"level": level, "type": kind, "size": size, "shared_cpu_list": "0-1"}
        for name, value in told.items():
            (folder / name).write_text(f"{value}\n")
    found = caches(0, tmp_path)
    assert [(cache.level, cache.bytes, cache.cores) for cache in found] == [(1, 48 << 10, (0, 1)), (3, 2 << 20, (0, 1))]
    assert caches(1, tmp_path) == []
