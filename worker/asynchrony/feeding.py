"""A worker thread that draws the next matrix while this one is multiplied: what asynchrony a program makes on a CPU.

A loop of `repeats` items (50 at most), each drawn (normal numbers, on one thread) and multiplied by itself. `serial`
does one after the other on one thread; in `fed` a thread draws ahead into a queue of two. `all_threads` is serial too,
and gives every product all cores: what the same cores are otherwise used for. `draw` and `multiply` do one half of the
work alone; with them

    overlap = (t_draw + t_multiply - t_fed) / min(t_draw, t_multiply)        at most 1

The generator starts from the same seed in every loop, so that the last product is known and checked.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstone.results import Check, Figure, Span
from worker.asynchrony.contest import Contest, Point
from worker.asynchrony.numpy_vs_torch import close_to
from worker.asynchrony.stage import Stage, duration, share_hidden
from worker.measure.race import Record
from worker.measure.resting import Resting
from worker.measure.statistics import FEWEST_ROUNDS, TOO_FEW, resampled_medians

PART = "feeding"
_SIZE = 256
_MOST_ITEMS = 50
_AHEAD = 2
_LANES = ("serial", "fed", "all_threads", "draw", "multiply")
_HALVES = ("draw", "multiply")


def measure(stage: Stage, budget_s: float) -> None:
    """Race the ways of doing both halves on the CPU device."""
    size = min(_SIZE, stage.spec.size)
    point = Point(str(size), {"size": size, "repeats": items(stage)})
    with Contest(stage, PART, "serial", budget_s) as contest:
        for lane in _LANES:
            contest.start(lane, lambda lane=lane: Feeding(lane, size, stage))  # type: ignore[misc]
        wrong = {name: {point.key: fault} for name in contest.names if (fault := _fault(stage, contest, name, point))}
        contest.race([point])
        contest.judge(wrong, uncompared=_HALVES)
        for name in ("serial", "fed"):
            for span in contest.attempt(name, "spans") or []:
                stage.result.spans.append(Span.model_validate({**span, "of": name}))
        _tell(stage, contest.record(point), point, wrong)


def items(stage: Stage) -> int:
    """How many a loop has: `repeats`, where these are not so many that a race of loops would take for ever."""
    return min(stage.spec.repeats, _MOST_ITEMS)


class Feeding(Resting):
    """One way of drawing and multiplying a loop of items."""

    def __init__(self, lane: str, size: int, stage: Stage) -> None:
        super().__init__(mode=torch.inference_mode)
        self.lane, self.size, self.repeats = lane, size, items(stage)
        self.seed, self.dtype = stage.spec.seed, stage.dtype
        torch.set_num_threads(stage.threads if lane == "all_threads" else 1)
        self.generator = torch.Generator()
        self.slots = [torch.zeros(size, size, dtype=self.dtype) for _ in range(_AHEAD + 2)]
        self.product = torch.zeros(size, size, dtype=self.dtype)
        self.last = self.slots[0].normal_(generator=self.generator.manual_seed(self.seed))
        loops = {"fed": self._fed, "draw": self._draw, "multiply": self._multiply}
        self.calls = {f"{PART}/{size}": loops.get(lane, self._serial)}
        self.marks: list[tuple[str, float, float]] | None = None
        self.begin, self.drawn = queue.SimpleQueue[bool](), queue.SimpleQueue[Tensor]()
        self.free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        if lane == "fed":
            for slot in self.slots[:_AHEAD]:
                self.free.put(slot)
            threading.Thread(target=self._feed, daemon=True).start()

    def facts(self) -> dict[str, Any]:
        """The mode that it runs in."""
        return {"dtype": str(self.dtype)}

    def output(self) -> dict[str, Any]:
        """Run the loop once; whether its last product is that of the last matrix drawn: fields of a Check row."""
        (key,) = self.calls
        with self.mode():
            self.calls[key]()
        expected = torch.Generator().manual_seed(self.seed)
        a = torch.zeros(self.size, self.size, dtype=self.dtype)
        for _ in range(self.repeats if self.lane != "multiply" else 1):
            a.normal_(generator=expected)
        if self.lane == "draw":
            return {"passed": bool(torch.equal(self.last, a)), "bitwise": bool(torch.equal(self.last, a))}
        x = a.numpy().astype(np.float64)
        return vars(close_to(self.product.numpy(), x @ x))

    def spans(self) -> list[dict[str, Any]]:
        """The timeline of one loop, in a pass of its own: a row for each thread."""
        (key,) = self.calls
        self.marks = []
        start_s = time.perf_counter()
        with self.mode():
            self.calls[key]()
        marks, self.marks = self.marks, None
        thread = {"draw": "feeder" if self.lane == "fed" else "main", "multiply": "main"}
        return [
            {
                "name": name,
                "at": {"part": PART, "thread": thread[name]},
                "start_s": begun_s - start_s,
                "end_s": ended_s - start_s,
            }
            for name, begun_s, ended_s in sorted(marks, key=lambda mark: mark[1])
        ]

    def _drawn_into(self, slot: Tensor) -> Tensor:
        begun_s = time.perf_counter()
        slot.normal_(generator=self.generator)
        self._mark("draw", begun_s)
        return slot

    def _squared(self, a: Tensor) -> None:
        begun_s = time.perf_counter()
        torch.mm(a, a, out=self.product)
        self._mark("multiply", begun_s)

    def _mark(self, name: str, begun_s: float) -> None:
        if self.marks is not None:
            self.marks.append((name, begun_s, time.perf_counter()))

    def _serial(self) -> None:
        self.generator.manual_seed(self.seed)
        for _ in range(self.repeats):
            self._squared(self._drawn_into(self.slots[0]))

    def _draw(self) -> None:
        self.generator.manual_seed(self.seed)
        for _ in range(self.repeats):
            self.last = self._drawn_into(self.slots[0])

    def _multiply(self) -> None:
        for _ in range(self.repeats):
            self._squared(self.last)

    def _fed(self) -> None:
        self.begin.put(True)
        for _ in range(self.repeats):
            slot = self.drawn.get()
            self._squared(slot)
            self.free.put(slot)

    def _feed(self) -> None:
        """The worker thread: as many items as the loop takes, each into a slot that is free again."""
        torch.set_num_threads(1)
        with torch.inference_mode():
            while self.begin.get():
                self.generator.manual_seed(self.seed)
                for slot in self._free_slots():
                    self.drawn.put(self._drawn_into(slot))

    def _free_slots(self) -> Iterator[Tensor]:
        for _ in range(self.repeats):
            yield self.free.get()


def _fault(stage: Stage, contest: Contest, name: str, point: Point) -> str | None:
    """Check one contestant's work; why it gets no speed-up."""
    told = contest.attempt(name, "output")
    if told is None:
        return None
    row = Check.model_validate({"name": "right_item", "of": name, "against": "float64", "at": point.at, **told})
    if name != contest.twin:
        stage.result.checks.append(row)
    return None if row.passed else f"its last product is not that of the last matrix: {row.detail}"


def _tell(stage: Stage, record: Record, point: Point, wrong: dict[str, dict[str, str]]) -> None:
    """The overlap with its interval, and the sentence."""
    cores = len(stage.bench.cores)
    row: dict[str, Any] = {"name": "overlap", "of": "fed", "at": {"part": PART, **point.at}, "value": None, "unit": "1"}
    if cores < 2:
        row["reason"] = "the leased devices have one core: two threads take turns on it; lease two devices"
    elif wrong or not {"fed", *_HALVES} <= record.seconds.keys():
        row["reason"] = "what it is computed from failed or was wrong"
    else:
        eta, ends = overlap(record)
        enough = record.rounds >= FEWEST_ROUNDS
        fed, draw, multiply = (float(np.median(record.seconds[of])) for of in ("fed", *_HALVES))
        shorter = "drawing" if draw < multiply else "multiplying"
        bound = f"the shorter half, {shorter}, can be hidden and no more; {cores} cores"
        row |= {"ci95": ends, "method": "(t_draw + t_multiply - t_fed) / min of both", "bound": bound}
        row |= {"value": eta} if enough else {"reason": TOO_FEW}
        share = share_hidden(eta, ends)
        hidden = f", so {share} of the shorter half is hidden" if enough else f": {TOO_FEW} what of it is hidden"
        alone = {of: float(np.median(s)) for of, s in record.seconds.items() if of in ("serial", "all_threads")}
        instead = ""
        if "all_threads" in alone:
            instead = f". The same cores inside each product instead: {duration(alone['all_threads'])}"
        stage.find(
            PART,
            f"{items(stage)} matrices of {point.at['size']} rows: drawing {duration(draw)}, multiplying "
            f"{duration(multiply)}, one after the other {duration(alone['serial'])}; with a thread that draws ahead "
            f"{duration(fed)}{hidden}{instead}",
        )
    stage.result.figures.append(Figure.model_validate(row))


def overlap(record: Record) -> tuple[float, list[float] | None]:
    """(t_draw + t_multiply - t_fed) / min(t_draw, t_multiply) on medians, and its bootstrap interval over rounds."""
    samples = np.stack([record.seconds[of] for of in ("draw", "multiply", "fed")])
    value = float(_overlap_of(np.median(samples, axis=1)))
    if samples.shape[1] < FEWEST_ROUNDS:
        return value, None
    drawn = _overlap_of(resampled_medians(samples, 1, 0, 2000))
    low, high = (float(q) for q in np.percentile(drawn, [2.5, 97.5]))
    return value, [low, high]


def _overlap_of(medians: Any) -> Any:
    draw, multiply, fed = medians
    return np.minimum(1.0, (draw + multiply - fed) / np.minimum(draw, multiply))
