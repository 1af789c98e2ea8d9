"""What a running experiment may ask of its surroundings: the `bench` that every workload is handed.

    def run(spec: JitSpec, bench: Bench) -> Result:
        bench.progress(done=3, total=10, unit="rounds")
        path = bench.file("script.pt")            # write there ...
        bench.keep(path, "application/octet-stream")   # ... and it becomes an artifact of the job
        ...

The bench knows the leased devices and their cores, a scratch folder, and a channel to the worker. It holds no torch
objects: it can be made in any process (`Bench.local()` in tests and notebooks).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchstone.ceilings import Ceilings

Event = dict[str, Any]


def _drop(event: Event) -> None:
    """Where nobody listens, progress goes nowhere."""


@dataclass(frozen=True)
class LeasedDevice:
    """A device that this job holds: its name, its type, the cores that go with it, and a GPU's UUID."""

    name: str
    type: str
    cores: tuple[int, ...]
    uuid: str | None = None


@dataclass(frozen=True)
class Assignment:
    """What a job's process is told: sent once, through the forkserver."""

    job_id: str
    attempt: int
    host: str
    spec: str
    devices: tuple[LeasedDevice, ...]
    folder: str
    memory_limit_bytes: int
    data_folders: tuple[str, ...] = ()
    """Where data sets that were fetched may lie."""
    service_url: str | None = None
    ceilings: dict[str, Any] | None = None
    """What this host can reach, as `torchstone.store.ceilings` found it."""
    spare_cores: tuple[int, ...] = ()
    """Cores of a machine that this job has to itself, beside those of its devices: nothing is measured on them."""
    preload: str = "worker.preload"
    """The module that has been imported in the forkserver which the process is forked from."""
    saved: tuple[tuple[str, str], ...] = ()
    """(name, file) of what an earlier attempt has saved; see `Bench.save`."""
    saved_fault: str | None = None
    """Why what was saved cannot be used, where that is so."""
    checkpoint_s: float = 60.0
    """How often at least a long experiment should save itself."""
    alive: str = ""
    """The file that says when the worker last renewed its leases (`worker.alive`); "" = nobody watches."""
    silence_s: float = 0.0
    """How long that may be ago."""


@dataclass
class Bench:
    """The surroundings of one attempt at one job."""

    job_id: str
    attempt: int
    host: str
    devices: list[LeasedDevice]
    folder: Path
    """Scratch folder of this attempt: removed afterwards; what was `keep`t is stored first."""
    send: Callable[[Event], None] = _drop
    data_folders: tuple[str, ...] = ()
    memory_limit_bytes: int | None = None
    """What the job may take in all; None where nobody limits it."""
    service_url: str | None = None
    """Where the HTTP service should answer."""
    ceilings: Ceilings = field(default_factory=lambda: Ceilings(None))
    """What this host can reach, by its `hardware` reports."""
    spare_cores: tuple[int, ...] = ()
    """Free for whatever is not measured; none where others may be at work there."""
    kept: list[dict[str, str]] = field(default_factory=list)
    saved: dict[str, Path] = field(default_factory=dict)
    """What an earlier attempt at this job has saved, by name."""
    saved_fault: str | None = None
    """Why what an earlier attempt has saved cannot be used: this attempt starts over."""
    checkpoint_s: float = 60.0
    """How often at least to `save`, where the experiment can go on from that."""
    store: Callable[[Event], bool] | None = None
    """Sends an event and waits until the worker has done what it says; None where nobody stores anything."""
    _last_progress_s: float = 0.0

    @classmethod
    def local(
        cls, folder: Path, cores: tuple[int, ...] | None = None, data_folders: tuple[str, ...] = (), devices: int = 1
    ) -> Bench:
        """A bench outside any worker: this process's own cores, shared out over so many CPU devices."""
        cores = cores or tuple(sorted(os.sched_getaffinity(0)))
        leased = [LeasedDevice(f"cpu:{i}", "cpu", cores[i::devices] or cores) for i in range(devices)]
        return cls("local", 1, "localhost", leased, folder, data_folders=data_folders)

    @property
    def cores(self) -> tuple[int, ...]:
        """All cores of all leased devices, in order."""
        return tuple(core for device in self.devices for core in device.cores)

    def step_aside(self) -> None:
        """Have this process work on the spare cores, where there are any: the devices' own are then left to others."""
        os.sched_setaffinity(0, self.spare_cores or self.cores)

    def file(self, name: str) -> Path:
        """A path in the scratch folder for a file called `name`."""
        return self.folder / name

    def keep(self, path: Path, media_type: str, name: str | None = None) -> None:
        """Make the finished file at `path` an artifact of the job, under `name` (default: the file's own)."""
        self.kept.append({"path": str(path), "name": name or path.name, "media_type": media_type})

    def save(self, parts: dict[str, Path]) -> bool:
        """Have these files stored for an attempt that must go on from here, in place of parts of the same names.

        Waits for that, so that it takes no time from what is measured next; False where they could not be stored.
        """
        if self.store is None:
            return False
        files = [{"name": name, "path": str(path)} for name, path in parts.items()]
        return self.store({"type": "checkpoint", "parts": files})

    def progress(
        self,
        done: float,
        total: float | None,
        unit: str,
        eta_s: float | None = None,
        message: str = "",
        *,
        begins: bool = False,
    ) -> None:
        """Tell how far the work has come; more than five a second are dropped, except the last (done == total), and
        what tells that something `begins`: it may stand there for long."""
        now = time.monotonic()
        if now - self._last_progress_s < 0.2 and done != total and not begins:
            return
        self._last_progress_s = now
        self.send(
            {
                "type": "progress",
                "progress": {"done": done, "total": total, "unit": unit, "eta_s": eta_s, "message": message},
            }
        )
