"""Fashion-MNIST's files: found, checked, fetched from a folder; broken ones refused with the way out."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from torchstone import datasets
from torchstone.errors import DataMissing, SetupError

REAL = Path(__file__).parents[3] / "shared" / "data" / "fashion-mnist"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with four small files that pass for the real ones, and no package installed."""
    folder = tmp_path / "source"
    folder.mkdir()
    real = datasets.FILES["fashion_mnist"]
    sums = {}
    for what, file in real.files.items():
        payload = f"the payload of {what}".encode()
        (folder / f"{file}.gz").write_bytes(gzip.compress(payload, mtime=7))
        sums[what] = hashlib.sha256(payload).hexdigest()
    small = replace(real, sha256=sums, debian_folder="nowhere/fashion-mnist")
    monkeypatch.setitem(datasets.FILES, "fashion_mnist", small)
    return folder


def test_fetched_files_are_found_and_read(source: Path, tmp_path: Path) -> None:
    target = datasets.fetch("fashion_mnist", tmp_path / "data", source)
    assert target == tmp_path / "data" / "fashion-mnist"
    assert datasets.locate("fashion_mnist", ["/nowhere", tmp_path / "data"]) == target
    assert datasets.read("fashion_mnist", "test-labels", target) == b"the payload of test-labels"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["fashion-mnist"], "no scratch is left"


def test_fetching_again_replaces_a_broken_file(source: Path, tmp_path: Path) -> None:
    target = datasets.fetch("fashion_mnist", tmp_path / "data", source)
    (target / "t10k-labels-idx1-ubyte.gz").write_bytes(b"broken")
    assert datasets.available(tmp_path / "data")[1]["state"] == "broken"
    datasets.fetch("fashion_mnist", tmp_path / "data", source)
    assert [row["state"] for row in datasets.available(tmp_path / "data")] == ["ready", "ready"]


def test_files_that_are_not_compressed_will_do(source: Path, tmp_path: Path) -> None:
    for path in source.iterdir():
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    target = datasets.fetch("fashion_mnist", tmp_path / "data", source)
    assert datasets.read("fashion_mnist", "train-images", target) == b"the payload of train-images"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not gzip at all", "is broken"),
        (gzip.compress(b"the payload of train-images", mtime=0)[:-12], "is broken"),
        (
            gzip.compress(b"another payload", mtime=0),
            "does not hold fashion_mnist's train-images: the SHA-256 of its 15 bytes",
        ),
        (None, "is missing"),
    ],
    ids=["not gzip", "cut short", "another file", "none"],
)
def test_what_is_not_right_is_refused_and_nothing_is_left(
    source: Path, tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = source / "train-images-idx3-ubyte.gz"
    path.write_bytes(content) if content is not None else path.unlink()
    with pytest.raises(DataMissing, match=said) as caught:
        datasets.fetch("fashion_mnist", tmp_path / "data", source)
    assert "torchstone data fetch fashion_mnist" in str(caught.value)
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.usefixtures("source")
def test_data_that_are_nowhere_say_where_they_were_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="torchstone data fetch fashion_mnist") as caught:
        datasets.locate("fashion_mnist", [tmp_path])
    assert str(tmp_path / "fashion-mnist") in str(caught.value) and "/nowhere/fashion-mnist" in str(caught.value)
    assert caught.value.code == "data_missing"
    assert datasets.available(tmp_path)[1]["state"] == "missing"


@pytest.mark.usefixtures("source")
def test_without_debians_programs_the_other_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"apt-get and dpkg-deb is not on this host.*--from"):
        datasets.fetch("fashion_mnist", tmp_path / "data")


def test_a_data_set_that_needs_no_files() -> None:
    with pytest.raises(SetupError, match="what can be fetched: fashion_mnist"):
        datasets.fetch("digits", Path("/nowhere"))


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the real files are not beside the project")
def test_the_command_fetches_the_real_files(tmp_path: Path) -> None:
    def torchstone(*words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", "from torchstone.cli import main; main()", "data", *words]
        return subprocess.run([*program, "--data", str(tmp_path)], capture_output=True, text=True)

    run = torchstone("fetch", "fashion_mnist", "--from", str(REAL))
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(tmp_path / "datasets" / "fashion-mnist")
    listed = torchstone("list")
    assert listed.stdout.count("ready") == 2
    (tmp_path / "datasets" / "fashion-mnist" / "t10k-images-idx3-ubyte.gz").write_bytes(b"x")
    assert "broken" in torchstone("list").stdout
    assert torchstone("fetch", "cifar").returncode == 1
