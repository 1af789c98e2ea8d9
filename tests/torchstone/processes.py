"""Real child programs for tests, and proof that none is left: every process of a test carries a mark of its own.

with marked() as mark:
    process = subprocess.Popen(argv, env=mark.environment)
    ...
    mark.wait_until_gone(within_s=5)       # AssertionError names what is left
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

VARIABLE = "TORCHSTONE_TEST_MARK"


@dataclass(frozen=True)
class Mark:
    """An environment variable that every descendant inherits, whatever group or parent it moves to."""

    value: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, VARIABLE: self.value}

    def processes(self) -> list[psutil.Process]:
        """Every living process that carries the mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(VARIABLE) == self.value and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_until_gone(self, within_s: float) -> None:
        wait_until(lambda: not self.processes(), within_s, lambda: f"left: {[p.cmdline() for p in self.processes()]}")


@contextlib.contextmanager
def marked() -> Iterator[Mark]:
    """A fresh mark; whatever still carries it at the end is killed."""
    mark = Mark(uuid.uuid4().hex)
    try:
        yield mark
    finally:
        for process in mark.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def wait_until(condition: Callable[[], object], within_s: float, otherwise: Callable[[], str] | None = None) -> None:
    """Ask until the condition holds; AssertionError at the deadline."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(otherwise() if otherwise else f"not within {within_s:g} s")
        time.sleep(0.01)
