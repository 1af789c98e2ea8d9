"""Two processes of a probe, on cores of their own, that hand each other a stream or the turn.

    channel = Pipes()                                              # made here, before the two are forked
    with Pair.start("pipe", bench.cores, channel) as pair:
        pair.stream(bench, report, "pipe", total_bytes=32 << 20, budget_s=0.5, method="os.pipe")
        pair.handover(bench, report, "pipe_handover", message_bytes=8, budget_s=0.5, method="os.pipe")

A stream is random words, compared outside the clock with what was sent; a turn carries its number. Both processes read
one clock, CLOCK_MONOTONIC: a stream's time runs from its first byte sent to its last byte received.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from worker.hardware.probe import ProbeBench, ProbeReport, Repeats
from worker.measure.contestant import Contestant, ContestantFailed
from worker.measure.statistics import FEWEST_ROUNDS

WITHIN_S = 30.0
"""Whoever answers no sooner hangs."""
_TURNS_S = 20e-3
"""About how long one timed run of turns takes."""
Asked = tuple[str, dict[str, Any]]


class Channel(Protocol):
    """What two processes talk through; side 0 sends the stream, side 1 receives it, turns go both ways."""

    chunk_bytes: int
    """The stream is put and taken in pieces of this size."""

    def take_side(self, side: int) -> None:
        """In each of the two processes, once: which of them it is."""
        ...

    def put(self, piece: memoryview) -> None:
        """Send a piece of the stream."""
        ...

    def take(self, into: memoryview) -> None:
        """Receive a piece of the stream."""
        ...

    def give_turn(self, number: int, message: memoryview) -> None:
        """Hand the turn over, with its number and as many bytes as `message` has."""
        ...

    def await_turn(self, message: memoryview) -> int:
        """Wait for the turn; its number."""
        ...

    def close(self) -> None:
        """In the process that made it: let go of it."""
        ...


def ask_all(asked: Sequence[tuple[Contestant, Asked]], within_s: float = WITHIN_S) -> list[Any]:
    """Ask several contestants at once; their answers, in order. Raises ContestantFailed as soon as one fails."""
    for contestant, (request, arguments) in asked:
        contestant.send(request, **arguments)
    pending = {contestant.pipe: (index, contestant) for index, (contestant, _) in enumerate(asked)}
    answers: list[Any] = [None] * len(asked)
    deadline_s = time.monotonic() + within_s
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            _, silent = next(iter(pending.values()))
            raise ContestantFailed(silent.name, "error", f"no answer within {within_s:g} s")
        for pipe in [pipe for pipe in pending if pipe in ready]:
            index, contestant = pending.pop(pipe)
            answers[index] = contestant.answer()
    return answers


def time_runs(
    run: Callable[[int], float], *, run_s: float, budget_s: float, first_count: int = 4
) -> tuple[int, Repeats]:
    """Time runs of one count, such that each takes about `run_s`, for `budget_s`: that count, and the seconds of each.

    `run(count)` gives its own seconds. The shorter runs that find the count are the warm-up.
    """
    end_s = time.monotonic() + budget_s
    count = first_count
    while (took_s := run(count)) < run_s / 4 and time.monotonic() < end_s:
        count *= 4
    count = max(1, round(count * run_s / took_s))
    seconds = list[float]()
    while len(seconds) < FEWEST_ROUNDS or time.monotonic() < end_s:
        seconds.append(run(count))
    return count, Repeats(tuple(seconds))


def span_s(told: Sequence[dict[str, float]]) -> float:
    """From the first beginning to the last end of what several did at once."""
    return max(each["ended_s"] for each in told) - min(each["begun_s"] for each in told)


@contextmanager
def closing(contestants: Sequence[Contestant]) -> Iterator[None]:
    """End and reap them all, whatever happens."""
    with ExitStack() as stack:
        for contestant in contestants:
            stack.callback(contestant.close)
        yield


@dataclass(frozen=True)
class Pair:
    """Both processes, and what was found wrong with what they handed over."""

    first: Contestant
    second: Contestant
    cores: tuple[int, int]

    @classmethod
    @contextmanager
    def start(cls, name: str, cores: tuple[int, ...], channel: Channel) -> Iterator[Self]:
        """Fork both, on the first and on the last of `cores`; end both, and close the channel, at the end."""
        ends = (cores[0], cores[-1])
        with ExitStack() as stack:
            stack.callback(channel.close)
            sides = []
            for side, core in enumerate(ends):
                contestant = Contestant.start(
                    f"{name}:{side}",
                    lambda side=side: Talker(channel, side),  # type: ignore[misc]
                    (core,),
                    1,
                )
                stack.callback(contestant.close)
                sides.append(contestant)
            yield cls(sides[0], sides[1], ends)

    @property
    def where(self) -> str:
        """For `method`: on which cores."""
        one, other = self.cores
        return f"two processes on cores {one} and {other}" if one != other else f"two processes, both on core {one}"

    def stream(
        self, bench: ProbeBench, report: ProbeReport, name: str, *, total_bytes: int, budget_s: float, method: str
    ) -> None:
        """Add the rate of a stream of `total_bytes` from the first process to the second."""
        bench.progress(f"{report.probe}: {name}")
        arguments = {"total_bytes": total_bytes, "seed": bench.seed}
        seconds, faults = list[float](), 0
        end_s = time.monotonic() + budget_s
        while len(seconds) < 1 + FEWEST_ROUNDS or time.monotonic() < end_s:
            begun, ended = ask_all([(self.first, ("send", arguments)), (self.second, ("receive", arguments))])
            seconds.append(ended["ended_s"] - begun["begun_s"])
            faults += ended["faults"]
        report.rate(
            name,
            Repeats(tuple(seconds[1:])),
            bytes=total_bytes,
            method=f"{method}; {self.where}; each byte counts once",
            working_set_bytes=total_bytes,
            statistic="median",
        )
        detail = f"{len(seconds)} streams of {total_bytes} bytes, {faults} words were not as sent"
        report.check(f"{name}_content", faults == 0, "what was sent", detail)

    def handover(
        self,
        bench: ProbeBench,
        report: ProbeReport,
        name: str,
        *,
        message_bytes: int,
        budget_s: float,
        method: str,
    ) -> None:
        """Add how long it takes to hand the turn over: half of the way there and back."""
        bench.progress(f"{report.probe}: {name}")

        def turns(count: int) -> float:
            asked = {"count": count, "message_bytes": message_bytes}
            there, _ = ask_all([(self.first, ("ping", asked)), (self.second, ("pong", asked))])
            return float(there["seconds"])

        count, took = time_runs(turns, run_s=_TURNS_S, budget_s=budget_s)
        report.latency(
            name,
            took,
            count=2 * count,
            bytes=2 * count * message_bytes,
            method=f"{method}; {self.where}; half of the way there and back",
            at={"message_bytes": message_bytes},
        )


class Talker:
    """One of the two."""

    def __init__(self, channel: Channel, side: int) -> None:
        self._channel = channel
        channel.take_side(side)
        self._words = np.empty(0, np.uint64)
        self._right = np.empty(0, np.uint64)

    def send(self, total_bytes: int, seed: int) -> dict[str, float]:
        """Send the stream once the other side is ready: when it began."""
        pieces = self._pieces(self._expected(total_bytes, seed))
        put = self._channel.put
        self._channel.await_turn(memoryview(bytearray(8)))
        begun_s = time.perf_counter()
        for piece in pieces:
            put(piece)
        return {"begun_s": begun_s}

    def receive(self, total_bytes: int, seed: int) -> dict[str, float]:
        """Receive it: when that ended, and how many words were not those that were sent."""
        right = self._expected(total_bytes, seed)
        if len(self._words) != len(right):
            self._words = np.empty_like(right)
        self._words[:] = 0
        pieces = self._pieces(self._words)
        take = self._channel.take
        self._channel.give_turn(0, memoryview(bytearray(8)))
        for piece in pieces:
            take(piece)
        ended_s = time.perf_counter()
        return {"ended_s": ended_s, "faults": int((self._words != right).sum())}

    def ping(self, count: int, message_bytes: int) -> dict[str, float]:
        """Hand the turn over and wait for it, `count` times: the seconds of all."""
        message, give, wait_for = (
            memoryview(bytearray(message_bytes)),
            self._channel.give_turn,
            self._channel.await_turn,
        )
        wait_for(message)
        begun_s = time.perf_counter()
        for number in range(count):
            give(number, message)
            if wait_for(message) != number:
                raise RuntimeError(f"turn {number} came back as another one")
        return {"seconds": time.perf_counter() - begun_s}

    def pong(self, count: int, message_bytes: int) -> dict[str, float]:
        """The other side of `ping`."""
        message, give, wait_for = (
            memoryview(bytearray(message_bytes)),
            self._channel.give_turn,
            self._channel.await_turn,
        )
        give(0, message)
        for _ in range(count):
            give(wait_for(message), message)
        return {}

    def _expected(self, total_bytes: int, seed: int) -> NDArray[np.uint64]:
        if len(self._right) != total_bytes // 8:
            self._right = np.random.default_rng(seed).integers(0, 2**64, total_bytes // 8, np.uint64)
        return self._right

    def _pieces(self, words: NDArray[np.uint64]) -> list[memoryview]:
        view, step = words.view(np.uint8).data, self._channel.chunk_bytes
        return [view[first : first + step] for first in range(0, len(view), step)]
