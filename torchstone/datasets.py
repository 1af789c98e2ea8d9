"""Fashion-MNIST on this host: where its files are looked for, whether they are right, and how to get them. No torch.

    folder = fetch("fashion_mnist", settings.datasets)          # `torchstone data fetch fashion_mnist`
    payload = read("fashion_mnist", "train-images", folder)     # the decompressed bytes, checked

The files are checked by the SHA-256 of what is in them: gzip's own headers differ from one distribution to another.
`digits` and made-up data need no files.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchstone.errors import DataMissing, SetupError


@dataclass(frozen=True)
class FileSet:
    """The files that make up a data set, in a folder of their own."""

    folder: str
    files: dict[str, str]
    """File name without .gz, by what is in it."""
    sha256: dict[str, str]
    """Of the decompressed bytes."""
    debian_package: str
    debian_folder: str


FILES: dict[str, FileSet] = {
    "fashion_mnist": FileSet(
        folder="fashion-mnist",
        files={
            "train-images": "train-images-idx3-ubyte",
            "train-labels": "train-labels-idx1-ubyte",
            "test-images": "t10k-images-idx3-ubyte",
            "test-labels": "t10k-labels-idx1-ubyte",
        },
        sha256={
            "train-images": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "test-images": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "test-labels": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        debian_package="dataset-fashion-mnist",
        debian_folder="usr/share/datasets/fashion-mnist",
    )
}


def locate(name: str, folders: Sequence[str | Path]) -> Path:
    """The folder that holds the data set's files: below one of `folders`, or where Debian's package puts them.

    Raises DataMissing, which says how to get them.
    """
    wanted = FILES[name]
    places = [Path(folder) / wanted.folder for folder in folders] + [Path("/") / wanted.debian_folder]
    for place in places:
        if all(_path(place, file) for file in wanted.files.values()):
            return place
    raise DataMissing(
        f"{name} is not on this host: it is in none of {', '.join(map(str, places))}; on this host run "
        f"`torchstone data fetch {name}`, with --data naming the worker's data folder"
    )


def read(name: str, what: str, folder: Path) -> bytes:
    """The decompressed bytes of one file, e.g. "train-images". Raises DataMissing where they are not the right ones."""
    wanted = FILES[name]
    path = _path(folder, wanted.files[what])
    if path is None:
        raise DataMissing(f"{folder / wanted.files[what]}.gz is missing; `torchstone data fetch {name}` gets it")
    try:
        payload = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataMissing(f"{path} is broken ({error}); `torchstone data fetch {name}` replaces it") from None
    found = hashlib.sha256(payload).hexdigest()
    if found != wanted.sha256[what]:
        raise DataMissing(
            f"{path} does not hold {name}'s {what}: the SHA-256 of its {len(payload)} bytes is {found}, "
            f"not {wanted.sha256[what]}; `torchstone data fetch {name}` replaces it"
        )
    return payload


def check(name: str, folder: Path) -> None:
    """Raise DataMissing unless every file in `folder` is right."""
    for what in FILES[name].files:
        read(name, what, folder)


def fetch(name: str, datasets: Path, source: Path | None = None) -> Path:
    """Put the data set into its folder below `datasets`, checked, all files at once; the folder.

    The files are copied from `source`, or else come out of Debian's package, for which no root is needed.
    Raises SetupError where there is no way to get them, DataMissing where what was found is not right.
    """
    if name not in FILES:
        raise SetupError(f"there is nothing to fetch for {name!r}; what can be fetched: {', '.join(FILES)}")
    target = datasets / FILES[name].folder
    datasets.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{FILES[name].folder}-", dir=datasets) as scratch:
        found = source or _from_debian(name, Path(scratch))
        check(name, found)
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        for file in FILES[name].files.values():
            path = _path(found, file)
            assert path is not None, "it was read a moment ago"
            shutil.copyfile(path, fresh / path.name)
        check(name, fresh)
        if target.exists():
            target.rename(Path(scratch) / "old")
        fresh.rename(target)
    return target


def available(datasets: Path) -> list[dict[str, str]]:
    """Every data set that can be named: `name`, `state` (ready, missing or broken) and `where` or what is wrong."""
    found = [{"name": "digits", "state": "ready", "where": "comes with Torchstone"}]
    for name in FILES:
        try:
            folder = locate(name, [datasets])
        except DataMissing:
            found.append({"name": name, "state": "missing", "where": f"torchstone data fetch {name}"})
            continue
        try:
            check(name, folder)
            found.append({"name": name, "state": "ready", "where": str(folder)})
        except DataMissing as error:
            found.append({"name": name, "state": "broken", "where": str(error)})
    return found


def _path(folder: Path, file: str) -> Path | None:
    return next((path for path in (folder / f"{file}.gz", folder / file) if path.is_file()), None)


def _from_debian(name: str, scratch: Path) -> Path:
    """Debian's package, downloaded and unpacked into `scratch` without being installed."""
    wanted = FILES[name]
    installed = Path("/") / wanted.debian_folder
    if all(_path(installed, file) for file in wanted.files.values()):
        return installed
    missing = [program for program in ("apt-get", "dpkg-deb") if shutil.which(program) is None]
    other = f"; or bring the {len(wanted.files)} .gz files from elsewhere and name their folder with --from"
    if missing:
        raise SetupError(f"{' and '.join(missing)} is not on this host, so Debian's package is out of reach{other}")
    _call(["apt-get", "download", wanted.debian_package], scratch, other)
    packages = list(scratch.glob("*.deb"))
    if not packages:
        raise SetupError(f"apt-get downloaded no {wanted.debian_package}{other}")
    _call(["dpkg-deb", "-x", str(packages[0]), str(scratch / "unpacked")], scratch, other)
    return scratch / "unpacked" / wanted.debian_folder


def _call(command: list[str], folder: Path, otherwise: str) -> None:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if run.returncode != 0:
        said = (run.stderr or run.stdout).strip().splitlines()
        raise SetupError(f"`{' '.join(command)}` failed: {said[-1] if said else 'it said nothing'}{otherwise}")
