"""`torchstone up` as a process, for tests of the whole: started once it is ready, and proven gone afterwards.

with running(tmp_path / "data") as up:
    Client(up.url).submit(...)
    up.process.send_signal(signal.SIGINT)
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.torchstone.processes import Mark, marked, wait_until

PROGRAM = [sys.executable, "-c", "from torchstone.cli import main; main()"]


@dataclass
class Running:
    """A `torchstone up` that said it is ready."""

    process: subprocess.Popen[bytes]
    mark: Mark
    log: Path
    url: str

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for_output(self, pattern: str, within_s: float) -> None:
        wait_until(lambda: re.search(pattern, self.output()), within_s, lambda: f"no {pattern!r} in:\n{self.output()}")

    def part(self, module: str) -> psutil.Process:
        """The process of a part: `service`, `worker`, or `valkey-server`."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if child.name() == module or child.cmdline()[-1] == module:
                    return child
        raise AssertionError(f"no part {module}:\n{self.output()}")


@contextlib.contextmanager
def running(data: Path, *words: str, **variables: str) -> Iterator[Running]:
    """Start it on a free port and wait until it is ready; at the end stop it, and find nothing left."""
    with marked() as mark:
        data.mkdir(parents=True, exist_ok=True)
        log = data / "up.log"
        inherited = {k: v for k, v in mark.environment.items() if not k.startswith("TORCHSTONE_") or v == mark.value}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*PROGRAM, "up", "--port", "0", "--data", str(data), *words],
                cwd=data,
                env={**inherited, **variables},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            up = Running(process, mark, log, "")
            wait_until(
                lambda: process.poll() is not None or "Ctrl-C stops everything" in up.output(),
                60,
                lambda: f"not ready:\n{up.output()}",
            )
            found = re.search(r"ready in [\d.]+ s: (http://\S+)", up.output())
            assert found, up.output()
            up.url = found[1]
            yield up
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
        mark.wait_until_gone(within_s=2)
