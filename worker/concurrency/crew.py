"""The processes of one part: started, given work one by one or all at once, and ended together.

    with Crew() as crew:
        crew.start("cpu:0", lambda: Products(...), cores=(0,), threads=1)
        crew.start("cpu:1", lambda: Products(...), cores=(1,), threads=1)
        crew.ask("cpu:0", "run")
        crew.ask_all(["cpu:0", "cpu:1"], "run")        # both are told before either is waited for

A process that dies, stands still or raises ends the job with the reason, also while another waits for it: whoever is
asked is listened to all the time. The process that holds a crew must never run a tensor operation
(`worker.measure.contestant`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Self

from worker.contestants.field import job_error
from worker.measure.contestant import Contestant, ContestantFailed
from worker.processes import Stillness

_LOOK_S = 1.0


class Crew:
    """All processes of a part by name; leaving it ends them."""

    def __init__(self) -> None:
        self.members: dict[str, Contestant] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for member in self.members.values():
            member.end()
        for member in self.members.values():
            member.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Their processes."""
        return tuple(member.pid for member in self.members.values())

    def start(self, name: str, make: Callable[[], object], cores: tuple[int, ...], threads: int) -> None:
        """A process for `name` that holds what `make` returns there."""
        self.members[name] = Contestant.start(name, make, cores, threads)

    def ask(self, name: str, request: str, /, **arguments: Any) -> Any:
        """The answer of one. Raises JobError."""
        return self.ask_all([name], request, **arguments)[0]

    def ask_all(self, names: Sequence[str], request: str, /, **arguments: Any) -> list[Any]:
        """The same of several at once; their answers in that order. Raises JobError."""
        return self.ask_each([(name, request, arguments) for name in names])

    def ask_each(self, orders: Sequence[tuple[str, str, dict[str, Any]]]) -> list[Any]:
        """(name, request, arguments) of each, all sent before any is waited for. Raises JobError."""
        answers: dict[str, Any] = {}
        try:
            for name, request, arguments in orders:
                self.members[name].send(request, **arguments)
            pending = {self.members[name].pipe: name for name, _, _ in orders}
            still = {name: Stillness(self.members[name].pid) for name in pending.values()}
            while pending:
                ready = wait(list(pending), _LOOK_S)
                for pipe in ready:
                    name = pending.pop(pipe)  # type: ignore[call-overload]
                    answers[name] = self.members[name].answer()
                for name in pending.values() if not ready else ():
                    self.members[name].give_up_if_still(still[name])
        except ContestantFailed as failure:
            raise job_error(failure, f"{failure.name}: ") from failure
        return [answers[name] for name, _, _ in orders]
