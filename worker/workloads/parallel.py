"""The `parallel` experiment: several devices at once, copies behind computing, streams, and a schedule by hand.

    result = run(parse_spec({"kind": "parallel", "size": 512, "repeats": 10, "budget_s": 8}), bench)

In order: how fast a product is here, and how many of them the budget holds; then part by part: its processes started,
a first result checked against float64, and its ways of doing the work raced in turns. Everything that was computed or
copied is compared after every run; a result that was read before it was there fails the job.

This process never runs a tensor operation: it forks the devices' processes, passes turns, and does arithmetic in numpy.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from torchstone.errors import JobError
from torchstone.parallel import ParallelSpec
from torchstone.parallel import Part as PartName
from torchstone.results import Code, Figure, Result
from worker.bench import Bench
from worker.concurrency import copies, devices, schedule, streams
from worker.concurrency.ceilings import against_ceilings
from worker.concurrency.crew import Crew
from worker.concurrency.lanes import Lane
from worker.concurrency.pace import Cost, Fit, Pace, Probe, fit, share_s
from worker.concurrency.part import Assigned, Checked, Part
from worker.concurrency.report import judge, key_of, known, overlap
from worker.concurrency.reproduce import reproduction
from worker.concurrency.scaling import curves, efficiencies
from worker.contestants import torchscript
from worker.measure.archive import write_archive
from worker.measure.environment import Load, frequency_mhz, host_facts
from worker.measure.quality import grade, load_codes, thread_codes
from worker.measure.race import Plan, Record, race
from worker.measure.statistics import RESAMPLES

BINARY = "application/octet-stream"
_LEAST_OVERLAPPED = 4
"""Of n products the last one's copy has none to hide behind: with few of them little could be hidden."""

_DOUBTFUL = 0.25
"""Half the width of an overlap's interval from which on it hardly tells anything from nothing."""


def run(spec: ParallelSpec, bench: Bench) -> Result:
    """Measure `spec` on the leased devices. Raises JobError, with what was measured until then."""
    return Experiment(spec, bench).run()


class Experiment:
    """One job under way."""

    def __init__(self, spec: ParallelSpec, bench: Bench) -> None:
        self.spec, self.bench = spec, bench
        self.result = Result()
        self.is_cuda = bench.devices[0].type == "cuda"
        self.parts = [part.value for part in PartName if part in spec.parts]
        self.codes: list[Code] = []
        self.races: dict[str, tuple[Record, Plan]] = {}
        self.floors: list[float] = []
        self.spent_s = 0.0
        """Of the budget, which is for measuring: starting processes and first results are not in it."""

    def run(self) -> Result:
        self._describe()
        try:
            self._find_pace()
            for part in self.parts:
                self._measure(part)
        except JobError as error:
            self._close()
            error.partial = self.result.to_json()
            raise
        self._close()
        return self.result

    def _describe(self) -> None:
        self.host = {"name": self.bench.host, **host_facts(self.bench.cores), "seed": self.spec.seed}
        self.host["devices"] = [asdict(device) for device in self.bench.devices]
        self.host["threads"] = self.spec.threads or len(self.bench.devices[0].cores)
        self.host["during"] = {}
        self.codes += thread_codes(self.host["threads"], self.bench.devices[0].cores)
        self.result.environment = {"hosts": [self.host]}
        script = self.bench.file("reproduce.py")
        script.write_text(reproduction(self.spec, self.host["threads"], len(self.bench.devices), self.is_cuda))
        self.bench.keep(script, "text/x-python")

    def _find_pace(self) -> None:
        self._say("timing a product")
        first, spec = self.bench.devices[0], self.spec
        with Crew() as crew:
            device = "cuda:0" if self.is_cuda else "cpu"
            crew.start("probe", lambda: Probe(spec.dtype, spec.seed, device), first.cores, self.host["threads"])
            self.pace = Pace(**crew.ask("probe", "measure", size=spec.size))
        print(f"  {self.pace.product_s:.4g} s a product of {spec.size} x {spec.size}", flush=True)

    def _measure(self, name: str) -> None:
        to_come = self.parts[self.parts.index(name) :]
        share = share_s(self.spec.budget_s - self.spent_s, name, to_come)
        directions = copies.DIRECTIONS if name == "overlap" and self.is_cuda else ("",)
        for direction in directions:
            self._measure_within(name, direction, share / len(directions))

    def _measure_within(self, name: str, direction: str, share: float) -> None:
        found = self._fit(name, share)
        self.codes += found.codes
        checked = Checked()
        assigned = Assigned(self.spec, tuple(self.bench.devices), found.size, found.repeats, self.bench.folder)
        self._say(f"{name}: starting")
        with Crew() as crew:
            try:
                parts = self._start(name, direction, crew, assigned, checked)
                for part in parts:
                    self._race(part, crew, share / len(parts))
                    self._figures(part, assigned)
            finally:
                self.result.checks += checked.rows.values()

    def _fit(self, name: str, share: float) -> Fit:
        count = len(self.bench.devices)
        costs = {
            # alone on each, on one after another twice over, on 2, 3, ... and all at once, in two streams
            "concurrency": Cost(products=4 * count, checks=2 * count + 2),
            "overlap": Cost(products=5, copies=6, checks=11) if self.is_cuda else Cost(4, copies=5, checks=10),
            "streams": Cost(products=4 * streams.LARGE_COUNT, checks=4 * streams.LARGE_COUNT),
            "schedule": Cost(products=0.5),
        }
        asked, least = {
            "concurrency": (self.spec.repeats, 1),
            "overlap": (self.spec.repeats, _LEAST_OVERLAPPED),
            "streams": (1, 1),
            "schedule": (1, 1),
        }[name]
        # Of what the streams part is given, half goes to the small work.
        return fit(self.pace, asked, least, costs[name], share / (2 if name == "streams" else 1), {"part": name})

    def _start(self, name: str, direction: str, crew: Crew, assigned: Assigned, checked: Checked) -> list[Part]:
        if name == "concurrency":
            return [(devices.on_cuda if self.is_cuda else devices.on_cpu)(crew, assigned, checked)]
        if name == "schedule":
            return [(schedule.on_cuda if self.is_cuda else schedule.on_cpu)(crew, assigned, checked)]
        if name == "streams":
            torchscript.preload()
            return streams.parts(crew, assigned, checked)
        if self.is_cuda:
            return [copies.on_cuda(crew, assigned, checked, direction)]
        return [copies.on_cpu(crew, assigned, checked)]

    def _race(self, part: Part, crew: Crew, budget_s: float) -> None:
        key = key_of(part)
        plan = Plan(part.baseline, self.spec.ci_half_width, budget_s, seed=self.spec.seed, single_calls=True)

        def tell(done: int, total: int | None, eta_s: float) -> None:
            later_s = self.spec.budget_s - self.spent_s - budget_s if part.name != self.parts[-1] else 0.0
            self.bench.progress(done, total, "rounds", eta_s + max(later_s, 0.0), key)

        self._say(f"{key}: measuring for at most {budget_s:.1f} s")
        cores = self.bench.cores
        frequency_before_mhz, before = frequency_mhz(cores[0]), Load.now(cores, crew.pids)
        record = race(list(part.lanes), key, plan, tell)
        during = Load.now(cores, crew.pids).since(before)
        print(f"  {record.rounds} rounds in {record.spent_s:.2f} s, stopped by {record.stopped_by}", flush=True)
        self.races[key] = (record, plan)
        self.spent_s += record.spent_s
        self.host["during"][key] = during
        judged = judge(self.result, part, record, plan)
        self.floors += [] if judged.noise_floor is None else [judged.noise_floor]
        self.codes += judged.codes
        for code in load_codes(during, (frequency_before_mhz, frequency_mhz(cores[0]))):
            self.codes.append(code.model_copy(update={"evidence": {"at": key, **code.evidence}}))
        self.codes += [Code(code="note", severity="info", evidence={"text": note}) for note in part.notes]

    def _figures(self, part: Part, assigned: Assigned) -> None:
        record, plan = self.races[key_of(part)]
        if part.name == "concurrency":
            scaling = efficiencies(part, record, plan)
            self.result.figures += scaling
            self.result.curves += curves(part, record, scaling)
            for lane in part.lanes:
                if lane.of in ("alone", "concurrent"):
                    flop = 2 * assigned.size**3 * assigned.repeats * lane.at["devices"]
                    self._rate("compute_rate", lane, record, lane.at, flop, "flop")
        if part.name == "overlap":
            moved = 2 * assigned.repeats * assigned.size**2 * (4 if self.spec.dtype == "float32" else 8)
            for lane in part.lanes:
                if lane.timing == "copy":
                    self._rate("copy_rate", lane, record, part.at, moved, "bytes", method="bytes read + written")
            self._overlaps(part, record)
        self.result.figures += against_ceilings(part, record, assigned, self.bench.ceilings)

    def _overlaps(self, part: Part, record: Record) -> None:
        seed, figures = self.spec.seed, self.result.figures
        if self.is_cuda:
            for how, copied in (("pageable", "pageable"), ("pinned", "pinned")):
                told = overlap(record, "compute", f"copy/{copied}", how, seed)
                self._doubt(told, "overlap", how, part.at)
                figures.append(
                    Figure.model_validate({"name": "overlap", "of": how, "at": part.at, "unit": "1", **told})
                )
            return
        for direction in copies.DIRECTIONS:
            at = {"direction": direction}
            figures.append(Figure(name="overlap", of="pinned", at=at, value=None, unit="1", reason=copies.WHY_NULL))
        told = overlap(record, "compute", "copy", "overlapped", seed)
        shared = self.bench.devices[0].name if len(self.bench.devices) == 1 else None
        if shared is None:
            self._doubt(told, "host_copy_overlap", "overlapped", {})
        told = known(told, shared)
        figures.append(Figure.model_validate({"name": "host_copy_overlap", "of": "overlapped", "unit": "1", **told}))

    def _doubt(self, told: dict[str, Any], name: str, of: str, at: dict[str, Any]) -> None:
        """Where the copies are short against how much the products' time varies, the figure says little."""
        ends = told["raw_ci95"]
        if ends is None or ends[1] - ends[0] > 2 * _DOUBTFUL:
            evidence = {"of": of, "at": at, "figure": name, "raw": told["raw"], "raw_ci95": ends}
            evidence["asked_half_width"] = _DOUBTFUL
            self.codes.append(Code(code="overlap_uncertain", severity="warning", evidence=evidence))

    def _rate(
        self, name: str, lane: Lane, record: Record, at: dict[str, Any], amount: int, of: str, **more: Any
    ) -> None:
        """What a run did, `flop` or `bytes`, over its median."""
        seconds = float(np.median(record.seconds[lane.name]))
        unit = {"flop": "FLOP/s", "bytes": "B/s"}[of]
        told = {"name": name, "of": lane.of, "at": at, "value": amount / seconds, "unit": unit}
        self.result.figures.append(Figure.model_validate({**told, of: amount, "seconds": seconds, **more}))

    def _close(self) -> None:
        self.result.noise_floor = max(self.floors, default=None)
        self.result.quality = grade(self.codes)
        if self.races:
            write_archive(self.bench.file("samples.npz"), self.races, {"resamples": RESAMPLES, "unit": "s"})
            self.bench.keep(self.bench.file("samples.npz"), BINARY)

    def _say(self, message: str) -> None:
        print(message, flush=True)
        self.bench.progress(0, None, "rounds", None, message, begins=True)
