"""What of a graph the backend overlaps: the chapter's small one, and a wider one of independent or dependent branches.

`one_thread` (on GPUs `one_stream`) runs all branches one after the other and is the baseline; `script` is the same as
one TorchScript program. Against them, what can overlap: on CPU devices `intra_op` (all cores inside each operation),
`jit_fork` and `python_threads` (a core for every branch); on GPUs `streams` and `cuda_graph`. With b equal branches

    overlap = (t_serial - t_overlapped) / (t_serial * (1 - 1 / b))

is the share of what could be hidden that was: (sum t_i - t) / (sum t_i - max t_i), which for two branches is the
usual (t_1 + t_2 - t_both) / min(t_1, t_2). In a dependent graph nothing can be hidden; its times are told to show it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._C._profiler import _ExperimentalConfig

from torchstone.asynchrony import Part
from torchstone.results import Check, Comparison, Figure, Span
from worker.asynchrony import forms
from worker.asynchrony.chain import Array, after, exactly, first_matrix, shift_matrix
from worker.asynchrony.contest import Contest, Point
from worker.asynchrony.forms import Branches
from worker.asynchrony.stage import Stage, duration, share_hidden, synchronizer
from worker.contestants.torchscript import preload
from worker.measure.resting import Resting
from worker.measure.statistics import FEWEST_ROUNDS, TOO_FEW

PART = Part.graph.value
CHAPTER = "chapter"
_SIZES = (64, 256)
_STEPS = 5
_TIMELINES = 5
_MOST_BRANCHES = 8
_CPU_LANES = ("one_thread", "script", "intra_op", "jit_fork", "python_threads")
_CUDA_LANES = ("one_stream", "streams", "cuda_graph")
_AGAINST = {"jit_fork": "script", "python_threads": "one_thread", "streams": "one_stream", "cuda_graph": "one_stream"}
"""What is overlapped, and the same work one after the other."""
_CANNOT_WIN = "each branch needs the one before: only other load on the machine makes it faster"


def measure(stage: Stage) -> None:
    """Race all forms on all graphs; then a timeline of the largest."""
    lanes = _CUDA_LANES if stage.on_cuda else _CPU_LANES
    branches = branches_of(stage)
    sizes = sorted({min(size, stage.spec.size) for size in _SIZES})
    wide = [
        Point(f"{kind}/{size}", {"graph": kind, "size": size})
        for kind in ("independent", "dependent")
        for size in sizes
    ]
    points = [Point(CHAPTER, {"graph": CHAPTER}), *wide]
    if not stage.on_cuda:
        preload()  # TorchScript's own libraries, once for all contestants
    with Contest(stage, PART, lanes[0], stage.budget_s(Part.graph)) as contest:
        for lane in lanes:
            contest.start(lane, lambda lane=lane: Grapher(lane, sizes, branches, stage))  # type: ignore[misc]
        wrong = _check_all(stage, contest, points, branches, "before the race")
        contest.race(points)
        for name, by_point in _check_all(stage, contest, points, branches, "after the race").items():
            wrong.setdefault(name, {}).update(by_point)
        wrong |= contest.unfinished()
        contest.judge(wrong)
        _tell(stage, contest, wide, branches, wrong)
        _timeline(stage, contest, sizes[-1])


def branches_of(stage: Stage) -> int:
    """As many as cores, at least two; on a GPU four."""
    return 4 if stage.on_cuda else max(2, min(_MOST_BRANCHES, len(stage.bench.cores)))


class Grapher(Resting):
    """One form of running all graphs; keys are PART/chapter and PART/KIND/SIZE."""

    def __init__(self, lane: str, sizes: list[int], branches: int, stage: Stage) -> None:
        super().__init__(synchronizer(stage.device), torch.inference_mode)
        self.lane = lane
        torch.set_num_threads(stage.threads if lane == "intra_op" else 1)
        run, small = _form(lane, stage, branches)
        self.graphs = {
            f"{PART}/{kind}/{size}": _branches(size, branches, kind == "dependent", stage)
            for kind in ("independent", "dependent")
            for size in sizes
        }
        self.works: dict[str, Callable[[], torch.Tensor]] = {
            f"{PART}/{CHAPTER}": small,
            **{key: partial(run, graph) for key, graph in self.graphs.items()},
        }
        self.results: dict[str, torch.Tensor] = {}
        self.calls = {key: partial(self._keep, key, work) for key, work in self.works.items()}

    def output(self, key: str, file: str) -> None:
        """Call once if that was never done, and write what the last call gave to `file`."""
        self.first_call(key)
        self.synchronize()
        np.save(file, self.results[key].cpu().numpy())

    def spans(self, key: str, median_s: float) -> list[dict[str, Any]]:
        """When each product of one run was under way, and where: of a few runs the one nearest `median_s`.

        By torch's profiler, in passes of their own, of which the first warms up what the race had not.
        """
        self._profiled(key)
        found = [self._profiled(key) for _ in range(_TIMELINES)]
        return min(found, key=lambda spans: abs(max((s["end_s"] for s in spans), default=0.0) - median_s))

    def _profiled(self, key: str) -> list[dict[str, Any]]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.results[key].device.type == "cuda":
            activities = [torch.profiler.ProfilerActivity.CUDA]
        everywhere = _ExperimentalConfig(profile_all_threads=True)  # else those of python_threads are not seen
        with self.mode(), torch.profiler.profile(activities=activities, experimental_config=everywhere) as profiler:
            self.calls[key]()
            self.synchronize()
        on_cuda = self.results[key].device.type == "cuda"
        events = [
            e for e in profiler.events() or [] if (e.device_type.name == "CUDA" if on_cuda else e.name == "aten::mm")
        ]
        rows = {who: row for row, who in enumerate(dict.fromkeys(event.device_resource_id for event in events))}
        first_us = min((event.time_range.start for event in events), default=0.0)
        return [
            {
                "name": "kernel" if on_cuda else "product",
                "at": {"part": PART, "stream" if on_cuda else "thread": rows[event.device_resource_id]},
                "start_s": (event.time_range.start - first_us) * 1e-6,
                "end_s": (event.time_range.end - first_us) * 1e-6,
            }
            for event in events
        ]

    def _keep(self, key: str, work: Callable[[], torch.Tensor]) -> None:
        self.results[key] = work()


def _form(lane: str, stage: Stage, branches: int) -> tuple[forms.Run, forms.Small]:
    makers: dict[str, Callable[[], tuple[forms.Run, forms.Small]]] = {
        "one_thread": forms.eager,
        "intra_op": forms.eager,
        "script": forms.script,
        "jit_fork": partial(forms.jit_fork, branches),
        "python_threads": partial(forms.python_threads, branches),
        "one_stream": partial(forms.cuda_eager, stage.device),
        "streams": partial(forms.streams, stage.device, branches),
        "cuda_graph": partial(forms.cuda_graph, stage.device, branches),
    }
    return makers[lane]()


def _branches(size: int, count: int, dependent: bool, stage: Stage) -> Branches:
    shift = torch.from_numpy(shift_matrix(size, stage.spec.dtype)).to(stage.device)
    starts = [torch.from_numpy(x).to(stage.device) for x in _starts(size, count, stage)]
    return Branches(shift, starts, _STEPS, dependent)


def _starts(size: int, count: int, stage: Stage) -> list[Array]:
    """What every branch starts from, (n, n) each."""
    return [first_matrix(size, stage.spec.dtype, stage.spec.seed + branch) for branch in range(count)]


def expected(point: Point, branches: int, stage: Stage) -> Array:
    """What a graph computes, exactly: the forms add in this order too."""
    if point.key == CHAPTER:
        return np.full((1, 2), 3.0, dtype=np.float32)
    starts = _starts(point.at["size"], branches, stage)
    total, last = np.zeros_like(starts[0]), np.zeros_like(starts[0])
    for x in starts:
        last = after(x + last if point.at["graph"] == "dependent" else x, _STEPS)
        total = total + last
    return total


def _check_all(
    stage: Stage, contest: Contest, points: list[Point], branches: int, when: str
) -> dict[str, dict[str, str]]:
    wrong: dict[str, dict[str, str]] = {}
    for point in points:
        right = expected(point, branches, stage)
        for name in contest.names:
            file = stage.bench.file(f"{PART}-{name}.npy")
            contest.attempt(name, "output", key=contest.key(point), file=str(file))
            if name not in contest.names:
                continue
            told = exactly(np.load(file), right)
            at = {**point.at, "when": when}
            row = Check.model_validate({"name": "exact", "of": name, "against": "known", "at": at, **told})
            if name != contest.twin:
                stage.result.checks.append(row)
            if not row.passed:
                wrong.setdefault(name, {})[point.key] = f"{when} its result is not exactly the graph's"
    return wrong


def _tell(stage: Stage, contest: Contest, wide: list[Point], branches: int, wrong: dict[str, dict[str, str]]) -> None:
    """Figures `overlap`, and a sentence for every graph."""
    cores = len(stage.bench.cores)
    if not any(CHAPTER in by_point for by_point in wrong.values()):
        small = "the chapter's graph, z = x * y + 2 of ones, gives [[3, 3]] in every form"
        stage.find(PART, f"{small}: {_times(contest, Point(CHAPTER))}")
    for point in wide:
        record = contest.record(point)
        enough = record.rounds >= FEWEST_ROUNDS
        told = []
        for name, against in _AGAINST.items():
            if name not in record.seconds or against not in record.seconds:
                continue
            row = _compared(contest, name, against, point, wrong)
            if row is not None and point.at["graph"] == "dependent" and row.verdict == "faster":
                row.verdict, row.reason = "inconclusive", _CANNOT_WIN
            figure = _overlap(stage, name, point, branches, cores, row, enough)
            stage.result.figures.append(figure)
            if row is not None and row.speedup is not None:
                _efficiency(stage, row, cores, enough)
                hidden = ""
                if figure.value is not None:
                    hidden = f", {share_hidden(figure.value, (figure.model_extra or {}).get('ci95'))} hidden"
                ratio = f"{name} {row.speedup:.2f}x of {against}, {row.verdict}{hidden}"
                told.append(ratio if enough else f"{name} against {against}: {TOO_FEW}")
        intra_op = _compared(contest, "intra_op", "one_thread", point, wrong)
        if intra_op is not None:
            _efficiency(stage, intra_op, cores, enough)
        kind = f"{branches} {point.at['graph']} branches of {_STEPS} products of size {point.at['size']}"
        stage.find(PART, "; ".join([f"{kind}: {_times(contest, point)}", *told]))


def _times(contest: Contest, point: Point) -> str:
    medians = {name: float(np.median(s)) for name, s in contest.record(point).seconds.items() if name != contest.twin}
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in medians.items())


def _compared(
    contest: Contest, name: str, against: str, point: Point, wrong: dict[str, dict[str, str]]
) -> Comparison | None:
    """The row that compares the two: there already where the baseline is one of them."""
    if against != contest.baseline:
        return contest.compare(name, against, point, wrong)
    rows = [r for r in contest.result.comparisons if (r.name, r.of, r.against, r.at) == (PART, name, against, point.at)]
    return rows[0] if rows else None


def _overlap(
    stage: Stage, name: str, point: Point, branches: int, cores: int, row: Comparison | None, enough: bool
) -> Figure:
    """The share of what could be hidden that was; null where there were not `enough` rounds."""
    fields: dict[str, Any] = {
        "name": "overlap",
        "of": name,
        "at": {"part": PART, **point.at},
        "value": None,
        "unit": "1",
    }
    if point.at["graph"] == "dependent":
        fields["reason"] = "each branch needs the one before: there is nothing to overlap"
    elif not stage.on_cuda and cores < 2:
        fields["reason"] = "the leased devices have one core: branches take turns on it; lease two devices"
    elif row is None or row.speedup is None:
        fields["reason"] = "no speed-up to compute it from"
    elif not enough:
        fields["reason"] = TOO_FEW
    else:
        most = 1 - 1 / branches
        fields["value"] = min(1.0, (1 - 1 / row.speedup) / most)
        fields["ci95"] = [min(1.0, (1 - 1 / end) / most) for end in row.ci95] if row.ci95 else None
        workers = f"{cores} cores" if not stage.on_cuda else "what is left of the device beside one branch"
        fields |= {
            "method": "(t_serial - t) / (t_serial (1 - 1 / branches))",
            "bound": f"{branches} branches, {workers}",
        }
    return Figure.model_validate(fields)


def _efficiency(stage: Stage, row: Comparison, cores: int, enough: bool) -> None:
    """`scaling_efficiency` of independent branches on several cores: T1 / (n Tn)."""
    if stage.on_cuda or cores < 2 or row.at["graph"] == "dependent" or row.speedup is None:
        return
    fields = {"name": "scaling_efficiency", "of": row.of, "at": {"part": PART, **row.at}, "unit": "1"}
    ends = [end / cores for end in row.ci95] if row.ci95 else None
    told = {"value": row.speedup / cores, "ci95": ends} if enough else {"value": None, "reason": TOO_FEW}
    stage.result.figures.append(Figure.model_validate({**fields, **told}))


def _timeline(stage: Stage, contest: Contest, size: int) -> None:
    """Spans of the largest independent graph, by thread or stream."""
    key = f"{PART}/independent/{size}"
    seconds = stage.races[key][0].seconds
    for name in contest.names:
        if name != contest.twin and name in seconds:
            for span in contest.attempt(name, "spans", key=key, median_s=float(np.median(seconds[name]))) or []:
                stage.result.spans.append(Span.model_validate({**span, "of": name}))
