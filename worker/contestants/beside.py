"""What a job has to do that needs no core of its devices: done while a contestant is at work there.

beside = Beside(is_possible=bool(bench.spare_cores))
beside.put(compare_the_last_output)           # at once where there are no other cores
field.attempt("trace", "output", beside.do_one, ...)
beside.finish()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Beside:
    """Tasks in the order in which they were put; `idle` is done where none is left."""

    is_possible: bool
    idle: Callable[[], None] = lambda: None
    _tasks: list[Callable[[], None]] = field(default_factory=list)

    def put(self, *tasks: Callable[[], None]) -> None:
        """Have them done soon; now, where nothing can be done beside a contestant."""
        if self.is_possible:
            self._tasks += tasks
        else:
            for task in tasks:
                task()

    def do_one(self) -> None:
        """The next task, while a contestant is at work."""
        if self._tasks:
            self._tasks.pop(0)()
        elif self.is_possible:
            self.idle()

    def finish(self) -> None:
        """All that is left."""
        while self._tasks:
            self._tasks.pop(0)()
