"""A training that was interrupted goes on in another attempt and ends with the same bits."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select

from tests.worker.fresh import call_fresh
from tests.worker.test_host import until
from torchstone.jobs import is_terminal
from torchstone.results import Result
from torchstone.settings import Settings
from torchstone.specs import parse_spec
from torchstone.store import Store, artifacts, checkpoints, jobs, logs, migrate
from torchstone.store.schema import loose_blobs, removals
from worker.bench import Bench
from worker.parallel import saving
from worker.parallel.report import Run
from worker.workloads import workload

LAYERS: list[dict[str, Any]] = [
    {"type": "Flatten"},
    {"type": "Linear", "in_features": 64, "out_features": 32},
    {"type": "BatchNorm1d", "num_features": 32},
    {"type": "ReLU"},
    {"type": "Dropout", "p": 0.3},
    {"type": "Linear", "in_features": 32, "out_features": 10},
]
SPEC: dict[str, Any] = {
    "kind": "train",
    "model": {"layers": LAYERS, "input_shape": [1, 8, 8]},
    "strategies": ["single", "scratch", "ddp"],
    "devices": {"count": 2},
    "epochs": 3,
    "batch_size": 200,
    "optimizer": {"name": "adam", "lr": 0.01},
    "schedule": "cosine",
    "augment": {"crop_padding": 1, "flip": True},
    "check_steps": 1,
}
OTHERS: dict[str, Any] = {
    **SPEC,
    "model": {"layers": [layer for layer in LAYERS if layer["type"] != "BatchNorm1d"], "input_shape": [1, 8, 8]},
    "strategies": ["fsdp", "tensor", "pipeline", "parameter_server"],
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "parameter_servers": "split",
}


def test_whatever_is_known_of_a_run_is_saved_with_it() -> None:
    apart = {"setting", "at", "checks", "distances", "epochs", "under_way", "weights", "exported_accuracy"}
    assert {field.name for field in fields(Run)} - apart == set(saving._RUN_FIELDS)


class Interrupted(Exception):
    """In place of a kill, at a moment that is the same in every run."""


def attempt(spec: dict[str, Any], folder: Path, saved: Path, saves: int, checkpoint_s: float) -> dict[str, Any] | None:
    """One attempt that saves into `saved` and goes on from what is there; None when it ended after so many saves."""
    folder.mkdir()
    saving._PAUSES = 0  # every save that is due is made, however little time has passed
    bench = Bench.local(folder, devices=2)
    bench.checkpoint_s = checkpoint_s
    bench.saved = {path.name: path for path in saved.iterdir()}
    left = saves

    def store(event: dict[str, Any]) -> bool:
        nonlocal left
        for part in event["parts"]:
            shutil.move(part["path"], saved / part["name"])
        left -= 1
        if left == 0:
            raise Interrupted
        return True

    bench.store = store
    try:
        result = workload("train")(parse_spec(spec), bench)
    except Interrupted:
        return None
    weights = {f["name"]: Path(f["path"]).read_bytes() for f in bench.kept if f["name"].endswith(".safetensors")}
    return {"result": result.to_json(), "weights": weights}


def run(spec: dict[str, Any], folder: Path, interruptions: list[int], checkpoint_s: float) -> tuple[Result, Any]:
    """The result and the weights of a job that is interrupted after so many saves, and again."""
    saved = folder / "saved"
    saved.mkdir(parents=True)
    for number, saves in enumerate(interruptions):
        gone = call_fresh(attempt, spec, folder / f"attempt{number}", saved, saves, checkpoint_s)
        assert gone is None, "it ended before it was interrupted"
    told = call_fresh(attempt, spec, folder / "last", saved, 1000, checkpoint_s)
    return Result.model_validate_json(told["result"]), told["weights"]


def curves(result: Result) -> dict[Any, Any]:
    return {(c.name, c.of, c.x_name): c.y for c in result.curves}


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, OTHERS], ids=["by data", "others"])
def test_an_interrupted_training_ends_with_the_same_bits(spec: dict[str, Any], tmp_path: Path) -> None:
    result, weights = run(spec, tmp_path / "whole", [], 60)
    # Given a save after every step, an attempt that ends within an epoch, and one that ends in the last epoch
    strategies = len(spec["strategies"])
    again, resumed = run(spec, tmp_path / "interrupted", [5, 24 * strategies - 12], 1e-6)
    # Then every strategy has the weights, the curves and the counts of an uninterrupted run
    assert weights.keys() == resumed.keys() == {f"{of}.safetensors" for of in spec["strategies"]}
    assert [name for name in weights if weights[name] != resumed[name]] == []
    assert curves(again) == curves(result)
    for name in ("samples_seen", "steps", "learning_rate", "test_accuracy", "exported_accuracy"):
        values = [{f.of: f.value for f in r.figures if f.name == name} for r in (result, again)]
        assert values[0] == values[1], name
    assert all(check.passed for check in again.checks)
    assert {t.n for t in again.timings if t.name == "epoch"} == {3}
    [code] = [code for code in again.quality.codes if code.code == "resumed"]
    steps = code.evidence["steps"]
    assert sum(steps.values()) == 24 * strategies - 7
    assert max(steps.values()) == 24 and min(steps.values()) % 8 != 0, "some are over, one is within an epoch"


def test_a_checkpoint_that_cannot_be_read_is_not_used(tmp_path: Path) -> None:
    spec = {**SPEC, "strategies": ["single"], "epochs": 2}
    _, weights = run(spec, tmp_path / "whole", [], 60)
    saved = tmp_path / "broken" / "saved"
    saved.mkdir(parents=True)
    assert call_fresh(attempt, spec, tmp_path / "broken" / "first", saved, 1, 60) is None
    data = (saved / "single").read_bytes()
    with zipfile.ZipFile(saved / "single") as archive:
        [rank] = [info for info in archive.infolist() if info.filename == "rank0"]
    middle = rank.header_offset + rank.file_size // 2
    (saved / "single").write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    told = call_fresh(attempt, spec, tmp_path / "broken" / "second", saved, 1000, 60)
    assert told["weights"] == weights
    codes = {code.code: code.evidence for code in Result.model_validate_json(told["result"]).quality.codes}
    assert "CRC" in codes["checkpoint_unusable"]["reason"] and "resumed" not in codes


class Station:
    """A worker process that can be killed, its database and its blobs."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(data=folder, poll_s=0.2, host_name="stand", cpu_devices=2, checkpoint_s=0.2)
        migrate(self.settings.database_url)
        self.store, self.blobs = Store(self.settings.database_url), folder / "artifacts" / "sha256"
        self.log = (folder / "worker.log").open("wb")
        self.worker: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, **self.settings.environment()}
        command = [sys.executable, "-m", "worker"]
        self.worker = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)

    def kill(self) -> None:
        assert self.worker is not None
        self.worker.kill()
        self.worker.wait()

    def submit(self, spec: dict[str, Any]) -> str:
        with self.store.write() as conn:
            [stored] = jobs.insert_many(conn, [jobs.NewJob.of(parse_spec(spec))])
        return stored.job_id

    def job(self, job_id: str) -> dict[str, Any]:
        with self.store.read() as conn:
            found = jobs.get(conn, job_id)
        assert found is not None
        return found

    def steps(self, job_id: str) -> float:
        return float(orjson.loads(self.job(job_id)["progress"] or "{}").get("done", 0))

    def saved(self, job_id: str) -> list[checkpoints.Part]:
        with self.store.read() as conn:
            return checkpoints.of(conn, job_id)

    def close(self) -> None:
        if self.worker is not None and self.worker.poll() is None:
            self.worker.terminate()
            self.worker.wait(timeout=30)
        self.store.dispose()
        self.log.close()


@pytest.fixture
def station(tmp_path: Path) -> Iterator[Station]:
    station = Station(tmp_path)
    yield station
    station.close()


@pytest.mark.slow
@pytest.mark.timeout(300)  # three attempts of a whole training, and one beside them
def test_a_job_outlives_the_workers_that_are_killed_under_it(station: Station, tmp_path: Path) -> None:
    spec = {**SPEC, "epochs": 40}
    _, weights = run(spec, tmp_path / "whole", [], 60)
    # Given a job whose worker is killed when all strategies were saved, and once more after the blobs were damaged
    station.start()
    job_id = station.submit(spec)
    total = 3 * 40 * 8
    until(lambda: {part.name for part in station.saved(job_id)} == {"single", "scratch", "ddp", "job"}, 60)
    station.kill()
    saved = station.saved(job_id)
    assert {part.attempt for part in saved} == {1}
    # When another worker takes its place, then the job goes on from there
    station.start()
    until(lambda: "going on from the checkpoint of attempt 1" in _log(station, job_id))
    until(lambda: station.job(job_id)["attempt"] == 2 and station.steps(job_id) > total / 2, 60)
    station.kill()
    # And a checkpoint whose bytes are damaged is not used: the third attempt begins at the beginning, and says so
    damaged = station.saved(job_id)[0].sha256
    with (station.blobs / damaged[:2] / damaged).open("r+b") as blob:
        blob.write(b"rotten")
    station.start()
    until(lambda: is_terminal(station.job(job_id)["state"]), within_s=120)
    job = station.job(job_id)
    assert job["state"] == "succeeded", job["error"]
    assert [attempt["outcome"] for attempt in job["attempts"]] == ["lost", "lost", "succeeded"]
    assert "are damaged" in _log(station, job_id) and "starting over" in _log(station, job_id)
    # Both ways lead to the same weights, and what was saved is gone, or known to whoever removes what nobody names
    with station.store.read() as conn:
        files = {row["name"]: row["sha256"] for row in artifacts.all_of(conn, job_id)}
    for name, data in weights.items():
        assert files[name] == hashlib.sha256(data).hexdigest(), name
    until(lambda: not station.saved(job_id))
    with station.store.read() as conn:  # a worker may be killed before it has removed what it has just replaced
        known = {sha256 for table in (loose_blobs, removals) for sha256 in conn.scalars(select(table.c.sha256))}
    there = {path.name for path in station.blobs.rglob("*") if path.is_file()}
    assert set(files.values()) <= there <= set(files.values()) | known


def _log(station: Station, job_id: str) -> str:
    with station.store.read() as conn:
        return "".join(text for _, _, text in logs.read(conn, job_id))
