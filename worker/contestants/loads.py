"""Exported files on their way through a clean process: begun as they are written, asked for when all are.

    loads = Loads(start, at_once=True)            # `start` makes the clean process: a Contestant with a CleanLoader
    loads.begin("script", program=..., folder=..., inputs=..., output=...)
    loads.finish()                                # {"script": None} where it ran, else the reason why it did not

With `at_once`, files are loaded while others are still being built, which only a process on cores of its own may do;
else one after another in `finish`. A file that takes the process down costs the next ones nothing but a new process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from worker.measure.contestant import Contestant, ContestantFailed


class Loads:
    """The files of one job, in the order in which they were begun."""

    def __init__(self, start: Callable[[], Contestant], at_once: bool) -> None:
        self._start, self._at_once = start, at_once
        self._loader: Contestant | None = None
        self._begun: dict[str, dict[str, Any]] = {}

    def prepare(self) -> None:
        """Start the clean process already."""
        self._loader = self._loader or self._start()

    def begin(self, name: str, **arguments: Any) -> None:
        """Have the file of `name` loaded and run; `arguments` are those of `CleanLoader.run`."""
        self._begun[name] = arguments
        if self._at_once:
            self._send(name)

    def finish(self) -> dict[str, str | None]:
        """Wait for all: why each could not be used, None where it could. The process is ended then."""
        reasons: dict[str, str | None] = {}
        sent = self._at_once
        for name in self._begun:
            if not sent:
                self._send(name)
            reasons[name] = self._answer()
            if self._loader is not None and self._loader.exit_status is not None:  # this file took it down
                self._loader, sent = None, False
        if self._loader is not None:
            self._loader.end(os.sched_getaffinity(0))
        return reasons

    def _send(self, name: str) -> None:
        self.prepare()
        assert self._loader is not None
        with contextlib.suppress(ContestantFailed):  # the answer tells
            self._loader.send("run", **self._begun[name])

    def _answer(self) -> str | None:
        assert self._loader is not None, "asked before"
        try:
            still_there = self._loader.answer()
        except ContestantFailed as failure:
            return failure.reason
        assert still_there == [], f"the loader is not clean: {still_there}"
        return None
