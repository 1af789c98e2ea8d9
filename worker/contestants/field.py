"""The contestants of one job: started, asked, dropped when they fail, and ended all together.

    with Field(cores, threads, baseline="eager", result=result) as field:
        field.start("script", lambda: Runner(...))
        field.attempt("script", "build", name="script")      # None where it failed: it is in result.skipped then

A contestant that fails is named in the result with its reason and the others go on. The baseline's failure ends the
job.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torchstone.errors import InvalidModel, JobError, OutOfMemory, ProcessDied, WorkloadError
from torchstone.results import Result, Skipped
from worker.measure.contestant import Contestant, ContestantFailed

_ERRORS: dict[str, type[JobError]] = {
    "invalid_model": InvalidModel,
    "out_of_memory": OutOfMemory,
    "died": ProcessDied,
}


class Field:
    """All contestants by name; leaving it ends every process that it started."""

    def __init__(self, cores: tuple[int, ...], threads: int, baseline: str, result: Result) -> None:
        self.cores, self.threads, self.baseline, self.result = cores, threads, baseline, result
        self.contestants: dict[str, Contestant] = {}
        self.dropped: set[str] = set()
        """Whose part was ended by a failure."""
        self._ended: list[Contestant] = []
        self._watched: list[Contestant] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.retire_all()
        for contestant in (*self._ended, *self._watched):
            contestant.close()

    @property
    def names(self) -> list[str]:
        """Who still takes part."""
        return list(self.contestants)

    @property
    def pids(self) -> tuple[int, ...]:
        """Their processes."""
        return tuple(contestant.pid for contestant in self.contestants.values())

    def start(self, name: str, make: Callable[[], object]) -> None:
        """A process for `name` that holds what `make` returns there."""
        self.contestants[name] = Contestant.start(name, make, self.cores, self.threads)

    def watch(self, contestant: Contestant) -> Contestant:
        """Another process, that takes no part, and is to be gone when the contestants are."""
        self._watched.append(contestant)
        return contestant

    def attempt(
        self, name: str, request: str, /, meanwhile: Callable[[], None] = lambda: None, **arguments: Any
    ) -> Any:
        """What the contestant answers; None where it fails now and is dropped, or was before.

        `meanwhile` is done here while it is at work, and in any case. Raises JobError for the baseline.
        """
        if name not in self.contestants:
            meanwhile()
            return None
        contestant = self.contestants[name]
        try:
            try:
                contestant.send(request, **arguments)
            finally:
                meanwhile()
            return contestant.answer()
        except ContestantFailed as failure:
            self.drop(name, failure)
            return None

    def drop(self, name: str, failure: ContestantFailed) -> None:
        """End its part, for this reason."""
        print(f"  {name} failed: {failure.reason}")
        if name == self.baseline:
            raise job_error(failure, f"the baseline {name} failed: ") from failure
        status = "skipped" if failure.kind == "unavailable" else "failed"
        self.result.skipped.append(Skipped(of=name, reason=failure.reason, status=status))
        self.dropped.add(name)
        self.end(name)

    def end(self, name: str) -> None:
        """End its process, without waiting for it; it leaves the cores to those that are still at work."""
        self._end(name, os.sched_getaffinity(0))

    def retire(self, name: str) -> None:
        """The same once nothing is timed any more: on whatever core is free."""
        self._end(name, self._all_cores)

    def retire_all(self) -> None:
        """End every process, also those that took no part."""
        for name in self.names:
            self.retire(name)
        for contestant in self._watched:
            contestant.end(self._all_cores)

    @property
    def _all_cores(self) -> set[int]:
        return {*self.cores, *os.sched_getaffinity(0)}

    def _end(self, name: str, cores: set[int]) -> None:
        contestant = self.contestants.pop(name)
        contestant.end(cores)
        self._ended.append(contestant)


def job_error(failure: ContestantFailed, prefix: str = "") -> JobError:
    """The error that ends the job because of `failure`."""
    return _ERRORS.get(failure.kind, WorkloadError)(prefix + failure.reason)
