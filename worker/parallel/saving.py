"""A training saved from time to time: another attempt goes on where a lost one stood, and ends with the same bits.

    saver = Saver(bench, runs)
    going_on = saver.restore()                 # fills the runs with what was measured; the rank files by run
    saver.save(gangs)                          # after each epoch, and within long ones; what has changed since

Each run is one part of the checkpoint: an uncompressed zip with `run.json` (what was measured), `marks.npy`,
`losses.npy`, and either a file for each rank with its weights, optimiser and random stream, or, once the run is over,
its trained weights. The data's order needs no saving: it follows from the seed, the epoch and the step.

Saving happens between what is measured, and after it the next waits ten times as long as it took: where epochs take
milliseconds, not every one is saved.
"""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from torchstone.results import Check, Figure, Skipped, dumps
from worker.bench import Bench
from worker.parallel.ranks import Gang
from worker.parallel.report import Epoch, Run

FORMAT = 1
_PAUSES = 10
_JOB = "job"
_EPOCH_FIELDS = ("number", "seconds", "samples", "steps", "right", "eval_samples", "eval_s", "learning_rate")
_RUN_FIELDS = (
    "start_s",
    "first_step_s",
    "is_compiled",
    "bytes_per_step",
    "peak_bytes",
    "diverged",
    "is_over",
    "reached_s",
)


@dataclass
class Restored:
    """What an earlier attempt had done."""

    attempt: int = 0
    hosts: set[str] = field(default_factory=set)
    ranks: dict[str, list[str]] = field(default_factory=dict)
    """The files of the ranks of each run that goes on."""
    skipped: dict[str, Skipped] = field(default_factory=dict)
    """The runs that took no further part."""


class Saver:
    """Saves the runs of one job, and restores them."""

    def __init__(self, bench: Bench, runs: list[Run]) -> None:
        self.bench, self.runs = bench, runs
        self._saved_steps: dict[str, tuple[int, bool]] = {}
        self._saved_skipped = -1
        self._number = 0
        self._ended_s, self._took_s = time.monotonic(), 0.0

    def save(self, gangs: Mapping[str, Gang], skipped: list[Skipped]) -> None:
        """Save the runs that have gone on since they were last saved, unless that was just now. Raises GangFailed."""
        begun_s = time.monotonic()
        if self.bench.store is None or begun_s - self._ended_s < _PAUSES * self._took_s:
            return
        self._number += 1
        parts, at = self._written(gangs, skipped)
        if parts and self.bench.save(parts):
            self._saved_steps |= at
            if _JOB in parts:
                self._saved_skipped = len(skipped)
        self._ended_s = time.monotonic()
        self._took_s = self._ended_s - begun_s

    def _written(
        self, gangs: Mapping[str, Gang], skipped: list[Skipped]
    ) -> tuple[dict[str, Path], dict[str, tuple[int, bool]]]:
        """The file of each part that is due, and where each run stands in it."""
        parts: dict[str, Path] = {}
        at: dict[str, tuple[int, bool]] = {}
        for run in self.runs:
            key, now = run.setting.key, (run.steps, run.is_over)
            if self._saved_steps.get(key, (0, False)) != now:
                file = self._tried(key, lambda run=run, key=key: self._write(run, gangs.get(key)))  # type: ignore[misc]
                if file is not None:
                    parts[key], at[key] = file, now
        if self._saved_skipped != len(skipped):
            file = self._tried(_JOB, lambda: self._write_job(skipped))
            if file is not None:
                parts[_JOB] = file
        return parts, at

    def _tried(self, key: str, write: Callable[[], Path | None]) -> Path | None:
        """What `write` gives; None, and nothing left of it, where the disk is full: the job goes on, saved later."""
        try:
            return write()
        except OSError as error:
            print(f"{key} could not be saved: {error}", flush=True)
            for pattern in (f"{key}.{self._number}.checkpoint", f"{key}.*.{self._number}.state"):
                for left in self.bench.folder.glob(pattern):
                    left.unlink(missing_ok=True)
            return None

    def _write_job(self, skipped: list[Skipped]) -> Path:
        file = self._file(_JOB)
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("job.json", self._document(skipped=[row.model_dump() for row in skipped]))
        return file

    def _write(self, run: Run, gang: Gang | None) -> Path | None:
        """The file; None where a rank could not write its part."""
        under_way = run.under_way if run.under_way and run.under_way.steps else None
        epochs = [*run.epochs, *([under_way] if under_way else [])]
        document = self._document(
            run={name: getattr(run, name) for name in _RUN_FIELDS},
            checks=[row.model_dump() for row in run.checks],
            distances=[row.model_dump() for row in run.distances],
            epochs=[{name: getattr(epoch, name) for name in _EPOCH_FIELDS} for epoch in epochs],
            is_under_way=under_way is not None,
        )
        file = self._file(run.setting.key)
        ranks = [] if run.is_over or gang is None else gang.ask("checkpoint", {"number": self._number})
        if None in ranks:
            for path in filter(None, ranks):
                Path(path).unlink(missing_ok=True)
            return None
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("run.json", document)
            arrays = {"marks": [e.marks for e in epochs], "losses": [np.array(e.losses) for e in epochs]}
            for name, rows in arrays.items():
                buffer = io.BytesIO()
                np.save(buffer, np.concatenate(rows))
                archive.writestr(f"{name}.npy", buffer.getvalue())
            for rank, path in enumerate(ranks):
                archive.write(path, f"rank{rank}")
                Path(path).unlink()
            if run.weights is not None:
                archive.write(run.weights, "weights")
        return file

    def _file(self, name: str) -> Path:
        return self.bench.file(f"{name}.{self._number}.checkpoint")

    def _document(self, **more: Any) -> str:
        """With what makes these bytes no other checkpoint's."""
        bench = self.bench
        who = {"format": FORMAT, "job": bench.job_id, "attempt": bench.attempt, "host": bench.host}
        return dumps({**who, "number": self._number, **more})

    def restore(self) -> Restored:
        """Fill the runs with what earlier attempts have done. Raises ValueError where that cannot be read.

        The runs may be half filled then.
        """
        restored = Restored()
        try:
            for run in self.runs:
                file = self.bench.saved.get(run.setting.key)
                if file is not None:
                    self._read(run, file, restored)
            if _JOB in self.bench.saved:
                with zipfile.ZipFile(self.bench.saved[_JOB]) as archive:
                    document = _header(archive.read("job.json"), restored)
                restored.skipped = {row["of"]: Skipped.model_validate(row) for row in document["skipped"]}
        except (OSError, KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return restored

    def _read(self, run: Run, file: Path, restored: Restored) -> None:
        with zipfile.ZipFile(file) as archive:
            document = _header(archive.read("run.json"), restored)
            for name, value in document["run"].items():
                setattr(run, name, value)
            marks, losses = (
                np.load(io.BytesIO(archive.read(f"{name}.npy")), allow_pickle=False) for name in ("marks", "losses")
            )
            begin = 0
            for fields in document["epochs"]:
                end = begin + fields["steps"]
                rows = [[(float(loss), int(n)) for loss, n in row] for row in losses[begin:end]]
                run.epochs.append(Epoch(**fields, losses=rows, marks=marks[begin:end]))
                begin = end
            run.under_way = run.epochs.pop() if document["is_under_way"] else None
            ranks = sorted((n for n in archive.namelist() if n.startswith("rank")), key=lambda n: int(n[4:]))
            folder = self.bench.file(f"from-{run.setting.key}")
            files = [archive.extract(name, folder) for name in ranks]
            if run.is_over:
                run.checks = [Check.model_validate(row) for row in document["checks"]]
                run.distances = [Figure.model_validate(row) for row in document["distances"]]
                if "weights" in archive.namelist():
                    run.weights = Path(archive.extract("weights", folder))
            else:
                restored.ranks[run.setting.key] = files
        if not run.is_over and not files:
            raise ValueError(f"no rank of {run.setting.key} was saved")
        self._saved_steps[run.setting.key] = (run.steps, run.is_over)


def _header(text: bytes, restored: Restored) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(text)
    if document["format"] != FORMAT:
        raise ValueError(f"it is of format {document['format']}, not {FORMAT}")
    restored.attempt = max(restored.attempt, document["attempt"])
    restored.hosts.add(document["host"])
    return document
