"""The `jit` experiment: which way of running this model is fastest here, and is it still right.

    result = run(parse_spec({"kind": "jit", "model": {"preset": "mlp"}}), bench)
    result.comparisons[0].speedup, result.comparisons[0].verdict

In order: the right answers (eager and float64) in a process of their own; every variant built, saved and reloaded in
its own process, each file loaded without Torchstone; every output checked; then, for each measuring point, the race;
then, in passes of their own, memory and the probes for what a form froze. A variant that cannot run is named in
`skipped` with its reason and the others go on; without its baseline the job fails.

On a machine that the job has to itself, whatever is not measured goes on beside the builds, on the other cores.

This process never runs a tensor operation: it forks the contestants, passes the turn, and does arithmetic in numpy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import orjson

from torchstone import fitness
from torchstone.errors import JobError, WorkloadError
from torchstone.results import Code, Figure, Result, Skipped, Timing
from torchstone.specs import JitSpec, Variant
from worker.bench import Bench
from worker.contestants import torchscript
from worker.contestants.beside import Beside
from worker.contestants.checks import Checks
from worker.contestants.field import Field, job_error
from worker.contestants.loads import Loads
from worker.contestants.passport import CleanLoader, loader_program, passport
from worker.contestants.reproduce import reproduction
from worker.contestants.runner import Reference, Runner
from worker.contestants.table import WAYS
from worker.contestants.ways import Setting, Way, setting_of
from worker.measure import roofline
from worker.measure.archive import write_archive
from worker.measure.contestant import Contestant, ContestantFailed
from worker.measure.environment import Load, frequency_mhz, host_facts
from worker.measure.heat import SET_ASIDE, Heat, choose, may_repeat
from worker.measure.points import Point
from worker.measure.quality import grade, load_codes, mode_codes, thread_codes
from worker.measure.race import Plan, race
from worker.measure.roofline import Work
from worker.measure.rows import judge, twin_of
from worker.measure.statistics import RESAMPLES

BINARY = "application/octet-stream"
_LOADED_FROM = {"output": "reference", "truth": "float64"}
"""What an exported file is checked against, and who writes it in eval mode."""


def run(spec: JitSpec, bench: Bench) -> Result:
    """Measure `spec` on the leased devices. Raises JobError where the model or the baseline cannot run."""
    return Experiment(spec, bench, setting_of(spec, bench), WAYS).run()


class Experiment:
    """One job under way, gathered so that its steps can be read one by one."""

    def __init__(self, spec: JitSpec, bench: Bench, setting: Setting, ways: dict[Variant, Way]) -> None:
        self.spec, self.bench, self.setting, self.ways = spec, bench, setting, ways
        self.result = Result()
        self.baseline = spec.baseline.value
        self.twin = twin_of(self.baseline)
        self.keys = [str(batch_size) for batch_size in spec.batch_sizes]
        temperatures = {"hot": [False], "cold": [True], "both": [False, True]}[spec.cache]
        self.points = [
            Point(batch_size, cold, spec.cache != "hot") for batch_size in spec.batch_sizes for cold in temperatures
        ]
        self.checks = Checks(bench.folder, spec.dtype, spec.grad, self.keys)
        self.build: dict[str, dict[str, Any]] = {}
        self.variants: dict[str, Variant] = {}
        """Who takes part, by name."""
        self.started: set[str] = set()
        self.exported: list[tuple[str, str]] = []
        """Names and files that are still to be loaded elsewhere."""
        self.probes: list[str] | None = None
        """The other inputs that the model takes; unknown until the reference has answered."""
        self.failure: JobError | None = None
        """Why there are no right answers."""
        self.codes: list[Code] = []
        self.host: dict[str, Any] = {}
        self.set_aside: Heat | None = None

    def run(self) -> Result:
        self.beside = Beside(bool(self.bench.spare_cores), self._load_elsewhere_if_ready)
        with Field(self.bench.cores, self.setting.threads, self.baseline, self.result) as self.field:
            self.bench.step_aside()  # nothing but contestants on the cores that are measured
            self._begin()
            self._build_all()
            self._check_all()
            self.unusable = self.loads.finish()
            heat = self._race_all()
            self._look_closer()
            raced = {name for record, _ in heat.races.values() for name in record.seconds}
            for name in raced & self.field.dropped:
                self.checks.withhold_all(name, "it failed before all of it was checked: see what was not measured")
            self.field.retire_all()
            self._offer_all()
            self._judge_all(heat)
        return self.result

    def _begin(self) -> None:
        """Who takes part; and the right answers, computed beside the builds where there are cores for that."""
        self._line_up()
        self._say("computing eager's and float64's outputs")
        files = self.checks.files
        self.loaded = {name: str(self.bench.file(f"{name}.pt")) for name in ("inputs", "inputs_cpu")}
        self.reference = self._start_beside("reference", lambda: Reference(self.setting))
        self.reference.send(
            "outputs",
            eager=files("reference", self.keys),
            truth=files("float64", self.keys + self.checks.probes),
            probes=files("reference", self.checks.probes),
            loaded=self.loaded
            | {what: self.checks.file(f"{who}.eval", self.keys[0]) for what, who in _LOADED_FROM.items()},
        )
        self.loads = Loads(lambda: self._start_beside("loader", CleanLoader), at_once=self.beside.is_possible)
        first, *others = self.variants
        self._start(first)
        self.beside.put(*(partial(self._start, name) for name in others), self._describe)
        if self.beside.is_possible:
            self.beside.put(self.loads.prepare)
        else:
            self._wait_for_what_is_right()

    def _wait_for_what_is_right(self) -> None:
        """Until the reference has answered, which it does once. Raises JobError where the model does not run."""
        if self.failure is not None:
            raise self.failure
        if self.probes is not None:
            return
        try:
            found = self.reference.answer()
        except ContestantFailed as failure:
            self.failure = job_error(failure)
            raise self.failure from failure
        self.reference.end(os.sched_getaffinity(0))
        self.probes = found["probes"]
        self.work = {key: Work.told(told) for key, told in found["work"].items()}
        for name, unit in (("parameters", "1"), ("parameter_bytes", "B")):
            self.result.figures.append(Figure(name=name, of="model", value=found[name], unit=unit))

    def _describe(self) -> None:
        self.host = {"name": self.bench.host, **host_facts(self.bench.cores), "seed": self.spec.seed}
        self.host["devices"] = [asdict(device) for device in self.bench.devices]
        self.result.environment = {"hosts": [self.host]}
        script = self.bench.file("reproduce.py")
        script.write_text(reproduction(self.spec, self.setting.threads, self.setting.device.type))
        self.bench.keep(script, "text/x-python")

    def _line_up(self) -> None:
        """Every variant that can run here, the baseline first, its twin last."""
        unfit = fitness.unfit(self.spec, self.setting.device.type)
        for variant in sorted(self.spec.variants, key=lambda v: v is not self.spec.baseline):
            reason = unfit.get(variant) or self.ways[variant].unavailable(self.setting)
            if reason and variant is self.spec.baseline:
                raise WorkloadError(f"the baseline {variant.value} cannot run: {reason}")
            if reason:
                self.result.skipped.append(Skipped(of=variant.value, reason=reason))
            else:
                self.variants[variant.value] = variant
        self.variants[self.twin] = self.spec.baseline

    def _start(self, name: str) -> None:
        """A process for this contestant, unless it was started before."""
        if name not in self.started:
            self.started.add(name)
            variant = self.variants[name]
            way, setting, cache = self.ways[variant], self.setting, self.bench.file(f"cache-{variant.value}")
            self.field.start(name, lambda: Runner(setting, way, cache))

    def _start_beside(self, name: str, make: Callable[[], object]) -> Contestant:
        """A process that takes no part, on the spare cores if there are any. As many threads: the same bits."""
        cores = self.bench.spare_cores or self.bench.cores
        return self.field.watch(Contestant.start(name, make, cores, self.setting.threads))

    def _build_all(self) -> None:
        """One after another, each alone on the devices' cores; what else there is to do is done beside them."""
        for name in list(self.variants):
            self._start(name)
            try:
                self._build(name, self.variants[name])
            except JobError:
                self._wait_for_what_is_right()  # a model that does not run at all is the better reason
                raise
        self.beside.finish()
        self._wait_for_what_is_right()
        self._load_elsewhere()
        if self.ways[self.spec.baseline].disk_cache:
            self.build[self.baseline]["build_warm_s"] = self.build[self.twin]["build_s"]

    def _build(self, name: str, variant: Variant) -> None:
        way = self.ways[variant]
        self._say(f"building {name}")
        told = self.field.attempt(name, "build", self.beside.do_one, name=name)
        if told is None:
            return
        self.build[name] = told
        if name == self.twin:
            return
        if told["file"]:
            self.exported.append((name, told["file"]))
        if told["was_warm"]:  # nothing may have been left for it: its cold build is none
            self.codes.append(Code(code="already_warm", severity="error", evidence={"of": name}))
        if way.disk_cache and name != self.baseline:
            again = f"{name}_rebuilt"
            self.variants[again] = variant
            self._start(again)
            warm = self.field.attempt(again, "build", name=again)
            told["build_warm_s"] = warm and warm["build_s"]
            if warm:
                self.field.end(again)
        elif not way.disk_cache and variant is not Variant.eager:
            told["build_warm_s"] = self.field.attempt(name, "rebuild", self.beside.do_one)
        print(f"  {name}: built in {told['build_s']:.3f} s", flush=True)

    def _check_all(self) -> None:
        for key in self.keys:
            for name in self.field.names:
                self.field.attempt(name, "output", self.beside.do_one, key=key, file=self.checks.file(name, key))
                if name in self.field.names:
                    at = {"batch_size": int(key)}
                    self.beside.put(partial(self.checks.timed, name, key, at, show=name != self.twin))
        self.beside.finish()

    def _race_all(self) -> Heat:
        field = self.field
        modes = {name: told for name in field.names if (told := field.attempt(name, "facts"))}
        self.host["torch"] = modes[self.baseline]
        self.codes += mode_codes(modes, self.baseline) + thread_codes(self.setting.threads, self.bench.cores)
        self.host["notices"] = [torchscript.NOTICE] if any("script" in n or "trace" in n for n in field.names) else []
        end_s = time.perf_counter() + self.spec.budget_s
        first, second = self._heat(end_s, "racing"), None
        if may_repeat(first, end_s - time.perf_counter()):
            second = self._heat(end_s, "doubtful and cheap: racing once more", len(self.points))
        heat, self.set_aside, codes = choose(first, second)
        self.host["during"] = heat.during
        self.codes += heat.codes + codes
        return heat

    def _heat(self, end_s: float, doing: str, first_seed: int = 0) -> Heat:
        """Every point raced once, the last of them until `end_s`."""
        field, cores = self.field, self.bench.cores
        compiled = {name: field.attempt(name, "compilations") for name in field.names}
        frequency_before_mhz, before = frequency_mhz(cores[0]), Load.now(cores, field.pids)
        heat = Heat({}, {})
        for index, point in enumerate(self.points):
            left_s = max(0.0, end_s - time.perf_counter()) / (len(self.points) - index)
            plan = Plan(
                self.baseline,
                self.spec.ci_half_width,
                left_s,
                self.spec.calls,
                seed=self.spec.seed + first_seed + index,
                single_calls=point.cold,
            )
            self._say(f"{doing} at {point} for at most {left_s:.1f} s")
            try:
                record = race(list(field.contestants.values()), point.key, plan, self._progress_of(index, doing))
            except ContestantFailed as fatal:
                raise job_error(fatal, f"the baseline {self.baseline} failed: ") from fatal
            for name, failure in record.failed.items():
                field.drop(name, failure)
            heat.races[point.key] = (record, plan)
            print(f"  {record.rounds} rounds in {record.spent_s:.2f} s, stopped by {record.stopped_by}", flush=True)
        heat.during = Load.now(cores, field.pids).since(before)
        heat.codes = load_codes(heat.during, (frequency_before_mhz, frequency_mhz(cores[0])))
        for name in field.names:
            now = field.attempt(name, "compilations")
            more = now - compiled[name] if now is not None else 0
            if more:
                evidence = {"of": name, "graphs": more}
                heat.codes.append(Code(code="compiled_while_timing", severity="warning", evidence=evidence))
        for point in self.points:
            found = judge(*heat.races[point.key], point.at, point.key, {}, self.build)
            heat.codes += found.codes
            heat.noise_floor = max(heat.noise_floor or 0.0, found.noise_floor or 0.0)
        return heat

    def _look_closer(self) -> None:
        """What has passes of its own: memory, other inputs than the timed one, a profile. Who is done with, ends."""
        if self.twin in self.field.names:
            self.field.retire(self.twin)
        for name in self.field.names:
            way = self.ways[Variant(name)]
            for key in self.keys:
                for what, value in (self.field.attempt(name, "memory", self.beside.do_one, key=key) or {}).items():
                    at = {"batch_size": int(key)}
                    self.result.figures.append(Figure(name=what, of=name, at=at, value=value, unit="B"))
            if self.spec.profile and name in self.field.names:
                path = self.bench.file(f"profile_{name}.json")
                self.field.attempt(name, "profile", key=self.keys[0], file=str(path))
                if path.exists():
                    self.bench.keep(path, "application/json")
            if way is not self.ways[Variant.eager] and name in self.field.names:
                shapes = way.takes_other_shapes(self.setting)
                probes = [p for p in self.probes or () if shapes or p not in ("batch_3", "row_alone", "shorter")]
                files = self.checks.files(name, probes)
                failed = self.field.attempt(name, "probe", files=files, other_shapes=shapes)
                if failed is not None:
                    self.beside.put(partial(self.checks.probed, name, failed, probes))
            if name in self.field.names:
                self.field.retire(name)
        self.beside.finish()

    def _load_elsewhere(self) -> None:
        """Have the exported files loaded and run by a process without Torchstone, on the inputs of the reference."""
        self._wait_for_what_is_right()
        for name, file in self.exported:
            self.loads.begin(
                name,
                program=loader_program(file),
                folder=str(self.bench.folder),
                inputs=self.loaded["inputs" if file.endswith(".pt2") else "inputs_cpu"],
                output=self.checks.file(f"{name}.loaded", self.keys[0]),
            )
        self.exported.clear()

    def _load_elsewhere_if_ready(self) -> None:
        if self.exported and (self.probes is not None or self.reference.has_answered):
            self._load_elsewhere()

    def _offer_all(self) -> None:
        """Every exported file that a process without Torchstone could use; its passport tells how that went."""
        for name, reason in self.unusable.items():
            if any(row.of == name for row in self.result.skipped):
                continue
            if reason is not None:
                self.checks.not_loaded(name, reason)
                continue
            path = self.bench.file(self.build[name]["file"])
            equal = self.checks.loaded(name, self.keys[0])
            if equal.passed:  # else it is not what was asked for
                flags = sorted(set(self.checks.wrong.get(name, {}).values()))
                made = passport(path, self.spec, Variant(name), equal, self.host, flags)
                proof = self.bench.file(f"{path.name}.passport.json")
                proof.write_bytes(orjson.dumps(made, option=orjson.OPT_INDENT_2))
                self.bench.keep(path, BINARY)
                self.bench.keep(proof, "application/json")

    def _judge_all(self, heat: Heat) -> None:
        floors = []
        self.result.checks = self.checks.rows
        for point in self.points:
            record, plan = heat.races[point.key]
            wrong = {name: by_key.get(str(point.batch_size), "") for name, by_key in self.checks.wrong.items()}
            found = judge(record, plan, point.at, point.key, wrong, self.build)
            self.result.timings += found.timings
            self.result.comparisons += found.comparisons
            timed = [row for row in found.timings if row.name == "latency"]
            self.result.figures += found.figures + [_throughput(row, point) for row in timed]
            self.result.figures += [self._roofline(row, point) for row in timed]
            floors += [found.noise_floor] if found.noise_floor is not None else []
        for name, told in self.build.items():
            for what, unit in (("artifact_bytes", "B"), ("save_s", "s"), ("load_s", "s")):
                if what in told and name != self.twin:
                    self.result.figures.append(Figure(name=what, of=name, value=told[what], unit=unit))
        self.result.noise_floor = max(floors, default=None)
        self.result.quality = grade(self.codes)
        other = {f"{key}/{SET_ASIDE}": made for key, made in (self.set_aside.races if self.set_aside else {}).items()}
        write_archive(self.bench.file("samples.npz"), heat.races | other, {"resamples": RESAMPLES, "unit": "s"})
        self.bench.keep(self.bench.file("samples.npz"), BINARY)

    def _roofline(self, timing: Timing, point: Point) -> Figure:
        return roofline.point(
            timing.of,
            point.at,
            self.work[str(point.batch_size)],
            timing.median,
            self.bench.ceilings,
            dtype=self.spec.dtype,
            device_type=self.setting.device.type,
            cores=self.setting.threads,
        )

    def _progress_of(self, index: int, doing: str) -> Callable[[int, int | None, float], None]:
        points, start_s = len(self.points), time.perf_counter()

        def tell(done: int, total: int | None, eta_s: float) -> None:
            later_s = (points - index - 1) * (time.perf_counter() - start_s + eta_s)
            self.bench.progress(done, total, "rounds", eta_s + later_s, f"{doing} at {self.points[index]}")

        return tell

    def _say(self, message: str) -> None:
        print(message, flush=True)
        self.bench.progress(0, None, "rounds", None, message, begins=True)


def _throughput(timing: Timing, point: Point) -> Figure:
    value = point.batch_size / timing.median if timing.median else None
    return Figure(name="throughput", of=timing.of, at=point.at, value=value, unit="samples/s")
