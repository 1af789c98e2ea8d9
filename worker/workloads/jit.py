"""The `jit` experiment: which way of running this model is fastest here, and is it still right.

    result = run(parse_spec({"kind": "jit", "model": {"preset": "mlp"}}), bench)
    result.comparisons[0].speedup, result.comparisons[0].verdict

In order: the right answers (eager and float64) in a process of their own; every variant built, saved and reloaded in
its own process; every output checked; then, for each batch size, the race. A variant that cannot run is named in
`skipped` with its reason and the others go on; without its baseline the job fails.

This process never runs a tensor operation: it forks the contestants, passes the turn, and does arithmetic in numpy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from torchstone.errors import InvalidModel, JobError, OutOfMemory, ProcessDied, WorkloadError
from torchstone.results import Check, Code, Figure, Result, Skipped
from torchstone.specs import JitSpec, Variant
from worker.bench import Bench
from worker.contestants.reproduce import reproduction
from worker.contestants.runner import Reference, Runner
from worker.contestants.table import WAYS
from worker.contestants.ways import Setting
from worker.measure.archive import write_archive
from worker.measure.contestant import Contestant, ContestantFailed
from worker.measure.environment import Load, frequency_mhz, host_facts
from worker.measure.equality import TOLERANCES, TRAINING_TOLERANCE, compare_outputs
from worker.measure.quality import grade, load_codes
from worker.measure.race import Plan, Record, race
from worker.measure.rows import judge, twin_of

_ERRORS: dict[str, type[JobError]] = {
    "invalid_model": InvalidModel,
    "out_of_memory": OutOfMemory,
    "died": ProcessDied,
}


def run(spec: JitSpec, bench: Bench) -> Result:
    """Measure `spec` on the leased devices. Raises JobError where the model or the baseline cannot run."""
    return _Experiment(spec, bench).run()


class _Experiment:
    """One job under way, gathered so that its steps can be read one by one."""

    def __init__(self, spec: JitSpec, bench: Bench) -> None:
        self.spec, self.bench = spec, bench
        device = bench.devices[0]
        self.setting = Setting(
            model=spec.model,
            seed=spec.seed,
            dtype=getattr(torch, spec.dtype),
            device=torch.device("cuda:0" if device.type == "cuda" else "cpu"),
            batch_sizes=tuple(spec.batch_sizes),
            grad=spec.grad,
            folder=bench.folder,
        )
        self.threads = spec.threads or len(bench.cores)
        self.result = Result()
        self.contestants: dict[str, Contestant] = {}
        self.ended: list[Contestant] = []
        self.wrong: dict[str, dict[str, str]] = {key: {} for key in self.keys}
        self.build: dict[str, dict[str, Any]] = {}

    @property
    def keys(self) -> list[str]:
        return [str(batch_size) for batch_size in self.spec.batch_sizes]

    def run(self) -> Result:
        try:
            self._find_what_is_right()
            self._build_all()
            self._check_all()
            self._measure_all()
        finally:
            for contestant in (*self.ended, *self.contestants.values()):
                contestant.end()
            for contestant in (*self.ended, *self.contestants.values()):
                contestant.close()
        return self.result

    def _find_what_is_right(self) -> None:
        self._say("computing eager's and float64's outputs")
        reference = self._start("reference", lambda: Reference(self.setting))
        reference.send(
            "outputs",
            eager={key: str(self._output_file("eager_reference", key)) for key in self.keys},
            truth={key: str(self._output_file("float64", key)) for key in self.keys},
        )
        self._describe()  # meanwhile
        try:
            with self._failing_the_job():
                facts = reference.answer()
        finally:
            reference.end()
            self.ended.append(reference)
        for name, unit in (("parameters", "1"), ("parameter_bytes", "B")):
            self.result.figures.append(Figure(name=name, of="model", value=facts[name], unit=unit))

    def _build_all(self) -> None:
        baseline = self.spec.baseline
        for variant in sorted(self.spec.variants, key=lambda v: v is not baseline):
            way = WAYS.get(variant)
            reason = way.unavailable(self.setting) if way else "this version of Torchstone cannot build it"
            if reason and variant is baseline:
                raise WorkloadError(f"the baseline {variant.value} cannot run: {reason}")
            if reason:
                self.result.skipped.append(Skipped(of=variant.value, reason=reason))
            else:
                self._build(variant.value, variant)
        self._build(twin_of(baseline.value), baseline)

    def _build(self, name: str, variant: Variant) -> None:
        way = WAYS[variant]
        self._say(f"building {name}")
        contestant = self._start(name, lambda: Runner(self.setting, way))
        self.contestants[name] = contestant
        with self._dropping(name):
            facts = self.build[name] = contestant.ask("build", name=name)
            if variant is not Variant.eager:
                facts["build_warm_s"] = contestant.ask("rebuild")
                print(f"  {name}: built in {facts['build_cold_s']:.3f} s, again in {facts['build_warm_s']:.3f} s")
            if facts["file"] and name == variant.value:
                self.bench.keep(self.bench.file(facts["file"]), way.media_type)
                size = facts["artifact_bytes"]
                self.result.figures.append(Figure(name="artifact_bytes", of=name, value=size, unit="B"))

    def _check_all(self) -> None:
        tolerance = TRAINING_TOLERANCE if self.spec.grad else TOLERANCES[self.spec.dtype]
        for key in self.keys:
            eager, truth = self._load("eager_reference", key), self._load("float64", key)
            for name in list(self.contestants):
                with self._dropping(name):
                    self.contestants[name].ask("output", key=key, file=str(self._output_file(name, key)))
                if name not in self.contestants:
                    continue
                ours = self._load(name, key)
                against = {"eager": eager, "float64": truth} if name != "eager" else {"float64": truth}
                for what, theirs in against.items():
                    equal = compare_outputs(ours, theirs, truth, tolerance, eager)
                    if not equal.passed:
                        self.wrong[key][name] = f"its output is not equal to {what}'s: {equal.detail}"
                    if name != twin_of(self.spec.baseline.value):
                        row = Check(name=f"equal_to_{what}", of=name, against=what, at=self._at(key), **vars(equal))
                        self.result.checks.append(row)
                        print(f"  {name} at batch {key}: equal to {what}: {'yes' if equal.passed else 'NO'}", end="")
                        print(f" (largest error {equal.max_abs_error})")

    def _measure_all(self) -> None:
        host, cores = self.result.environment["hosts"][0], self.bench.cores
        with self._failing_the_job():
            host["torch"] = self.contestants[self.spec.baseline.value].ask("facts")
        pids = tuple(contestant.pid for contestant in self.contestants.values())
        frequency_before_mhz, before = frequency_mhz(cores[0]), Load.now(cores, pids)
        races: dict[str, tuple[Record, Plan]] = {}
        end_s = time.perf_counter() + self.spec.budget_s
        for index, key in enumerate(self.keys):
            left_s = max(0.0, end_s - time.perf_counter()) / (len(self.keys) - index)
            plan = Plan(
                self.spec.baseline.value, self.spec.ci_half_width, left_s, self.spec.calls, seed=self.spec.seed + index
            )
            self._say(f"racing at batch size {key} for at most {left_s:.1f} s")
            with self._failing_the_job():
                record = race(list(self.contestants.values()), key, plan, self._progress_of(index))
            for name, failure in record.failed.items():
                self._drop(name, failure)
            races[key] = (record, plan)
            print(f"  {record.rounds} rounds in {record.spent_s:.2f} s, stopped by {record.stopped_by}")
        host["during"] = Load.now(cores, pids).since(before)
        codes = load_codes(host["during"], (frequency_before_mhz, frequency_mhz(cores[0])))
        for contestant in self.contestants.values():
            contestant.end()  # their memory is taken down while the figures are worked out
        self._judge_all(races, codes)

    def _judge_all(self, races: dict[str, tuple[Record, Plan]], codes: list[Code]) -> None:
        floors = []
        for key, (record, plan) in races.items():
            found = judge(record, plan, self._at(key), key, self.wrong[key])
            self._add_builds(found.timings)
            self._add_throughput(found.timings, int(key))
            self.result.timings += found.timings
            self.result.comparisons += found.comparisons
            self.result.figures += found.figures
            codes += found.codes
            floors += [found.noise_floor] if found.noise_floor is not None else []
        self.result.noise_floor = max(floors, default=None)
        self.result.quality = grade(codes)
        write_archive(self.bench.file("samples.npz"), races, {"resamples": 2000, "unit": "s"})
        self.bench.keep(self.bench.file("samples.npz"), "application/octet-stream")

    def _describe(self) -> None:
        host = {"name": self.bench.host, **host_facts(self.bench.cores), "seed": self.spec.seed}
        host["devices"] = [asdict(device) for device in self.bench.devices]
        self.result.environment = {"hosts": [host]}
        script = self.bench.file("reproduce.py")
        script.write_text(reproduction(self.spec, self.threads))
        self.bench.keep(script, "text/x-python")

    def _add_builds(self, timings: list[Any]) -> None:
        for timing in timings:
            facts = self.build[timing.of]
            timing.build_warm_s = facts.get("build_warm_s")
            timing.build_cold_s = facts["build_cold_s"] if timing.build_warm_s is not None else None

    def _add_throughput(self, timings: list[Any], batch_size: int) -> None:
        for timing in timings:
            if timing.name == "latency" and timing.median:
                value = batch_size / timing.median
                at = {"batch_size": batch_size}
                self.result.figures.append(
                    Figure(name="throughput", of=timing.of, at=at, value=value, unit="samples/s")
                )

    def _progress_of(self, index: int) -> Any:
        points, start_s = len(self.keys), time.perf_counter()

        def tell(done: int, total: int | None, eta_s: float) -> None:
            later_s = (points - index - 1) * (time.perf_counter() - start_s + eta_s)
            message = f"batch size {self.keys[index]}"
            self.bench.progress(done, total, "rounds", eta_s + later_s, message)

        return tell

    def _start(self, name: str, make: Any) -> Contestant:
        return Contestant.start(name, make, self.bench.cores, self.threads)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """A contestant's failure ends its part in the race; the baseline's ends the job."""
        try:
            yield
        except ContestantFailed as failure:
            self._drop(name, failure)

    @contextmanager
    def _failing_the_job(self) -> Iterator[None]:
        try:
            yield
        except ContestantFailed as failure:
            raise _ERRORS.get(failure.kind, WorkloadError)(failure.reason) from failure

    def _drop(self, name: str, failure: ContestantFailed) -> None:
        print(f"  {name} failed: {failure.reason}")
        if name == self.spec.baseline.value:
            raise _ERRORS.get(failure.kind, WorkloadError)(f"the baseline {name} failed: {failure.reason}") from failure
        status = "skipped" if failure.kind == "unavailable" else "failed"
        self.result.skipped.append(Skipped(of=name, reason=failure.reason, status=status))
        self.contestants.pop(name).close()

    def _output_file(self, name: str, key: str) -> Any:
        return self.bench.file(f"output-{name}-{key}.npz")

    def _load(self, name: str, key: str) -> list[Any]:
        with np.load(self._output_file(name, key)) as archive:
            return [archive[entry] for entry in archive.files]

    def _at(self, key: str) -> dict[str, Any]:
        return {"batch_size": int(key)}

    def _say(self, message: str) -> None:
        print(message, flush=True)
        self.bench.progress(0, None, "rounds", None, message)
