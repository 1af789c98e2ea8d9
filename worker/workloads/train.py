"""The `train` experiment: one model trained by several strategies; is it the same, how fast, how does it scale.

    result = run(parse_spec({"kind": "train", "model": {"preset": "lenet"}, "devices": {"count": 2}}), bench)

In order: the reference; then, for each strategy, its ranks started and its first steps proven equal; then the epochs,
in rounds: every strategy trains one epoch and is scored, in random order, before any trains the next, so that what
disturbs the machine disturbs all. At the end the models are written, exported, and scored again by a process without
Torchstone. A strategy that cannot run here is `skipped`, one that raises `failed`, and the others go on; a rank that
dies or stands still ends the job, with what was measured until then. Where an earlier attempt at the job was lost, this
one goes on from what that has saved: its strategies are proven equal anew, then put where they stood.

This process never runs a tensor operation: it forks the ranks, asks them, and does arithmetic in numpy.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchstone.errors import JobError, WorkloadError
from torchstone.results import Code, Figure, Result, Skipped
from torchstone.training import TrainSpec
from worker.bench import Bench
from worker.contestants.passport import CleanLoader
from worker.measure.environment import Load, frequency_mhz, host_facts
from worker.measure.quality import grade, load_codes
from worker.parallel.export import Exporter, merge, right_answers, scoring_program
from worker.parallel.loop import ONE_PROCESS, Trainer
from worker.parallel.proof import Proof, replicas_row
from worker.parallel.ranks import Gang, GangFailed, job_error
from worker.parallel.reference import Reference
from worker.parallel.remarks import remarks
from worker.parallel.report import Epoch, Run, epoch_loss, report, roofline_of
from worker.parallel.reproduce import reads_files, reproduction
from worker.parallel.saving import Restored, Saver
from worker.parallel.setting import Setting
from worker.parallel.table import unavailable

BINARY = "application/octet-stream"
_ONE_SAMPLE = " (BatchNorm has no statistics of a share of one sample: choose another batch_size, or drop_last)"


def run(spec: TrainSpec, bench: Bench) -> Result:
    """Train as `spec` says on the leased devices. Raises JobError, with what was measured until then."""
    return Experiment(spec, bench).run()


class Experiment:
    """One job under way."""

    def __init__(self, spec: TrainSpec, bench: Bench) -> None:
        self.spec, self.bench = spec, bench
        self.result = Result()
        self.host: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.codes: list[Code] = []
        self.runs = self._runs()
        self.saver = Saver(bench, self.runs)
        self.restored = Restored()
        self.steps_restored = 0
        self.gangs: dict[str, Gang] = {}
        self.steps_told: dict[str, int] = {}
        self.begun_s = time.perf_counter()

    def run(self) -> Result:
        try:
            self._restore()
            with ExitStack() as self.open:
                self._find_what_is_right()
                self._start_all()
                before = self._load_before()
                self._train_all()
                self._load_after(before)
                self._keep_all()
                self.gangs.clear()
            self._export_all()
        except JobError as error:
            if any(run.checks or run.epochs for run in self.runs):  # else nothing is known
                self.codes.append(Code(code="ended_early", severity="warning", evidence={"error": error.code}))
                self._report()
                error.partial = self.result.to_json()
            raise
        self._report()
        return self.result

    def _runs(self) -> list[Run]:
        spec, devices = self.spec, tuple(self.bench.devices)
        runs = []
        for strategy in (s.value for s in sorted(spec.strategies, key=lambda s: s.value != "single")):
            ours = devices[:1] if strategy == "single" else devices
            for scaling in spec.scaling if strategy != "single" else ["strong"]:
                weak = scaling == "weak"
                setting = Setting(
                    spec=spec,
                    strategy=strategy,
                    devices=ours,
                    batch_size=spec.batch_size * (len(ours) if weak else 1),
                    folder=self.bench.folder,
                    data_folders=self.bench.data_folders,
                    key=f"{strategy}-weak" if weak else strategy,
                )
                runs.append(Run(setting, {"scaling": "weak"} if weak else {}))
        return runs

    def _restore(self) -> None:
        """Take over what an earlier attempt has done, if there was one."""
        fault = self.bench.saved_fault
        if self.bench.saved:
            try:
                self.restored = self.saver.restore()
            except ValueError as error:
                fault = str(error)
                self.runs[:] = self._runs()
                self.saver = Saver(self.bench, self.runs)
        if fault is not None:
            print(f"the checkpoint of an earlier attempt cannot be used ({fault}): starting over", flush=True)
            self.codes.append(Code(code="checkpoint_unusable", severity="info", evidence={"reason": fault}))
        elif self.restored.attempt:
            done = {run.setting.key: run.steps for run in self.runs if run.steps}
            print(f"going on from the checkpoint of attempt {self.restored.attempt}, steps: {done}", flush=True)
            hosts = sorted({*self.restored.hosts, self.bench.host})
            evidence = {"attempt": self.restored.attempt, "steps": done, "hosts": hosts}
            # Times that were taken on two machines are no one sample.
            severity: Any = "info" if len(hosts) == 1 else "warning"
            self.codes.append(Code(code="resumed", severity=severity, evidence=evidence))
            self.steps_told, self.steps_restored = dict(done), sum(done.values())

    def _find_what_is_right(self) -> None:
        self._say("loading the data")
        first = self.runs[0].setting
        self.reference = self._gang("reference", first, lambda rank, life: Reference(first), one=True)
        try:
            sizes = sorted({run.full_batch for run in self.runs})
            asked = {"devices": len(self.bench.devices), "batch_sizes": sizes}
            (self.facts,) = self.reference.ask("facts", asked)
        except GangFailed as failure:
            raise job_error(failure) from None
        self.proof = Proof(self.spec, self.bench.folder, self.reference, self.facts)
        self.host = {"name": self.bench.host, **host_facts(self.bench.cores), "seed": self.spec.seed}
        self.host["devices"] = [asdict(device) for device in self.bench.devices]
        self.result.environment = {"hosts": [self.host]}
        of_input = [("input_mean", "1"), ("input_std", "1")] if self.facts["input_std"] != 1 else []
        for name, unit in (("parameters", "1"), ("state_bytes", "B"), *of_input):
            self.result.figures.append(Figure(name=name, of="model", value=self.facts[name], unit=unit))
        self._reproduce()

    def _reproduce(self) -> None:
        script = self.bench.file("reproduce.py")
        script.write_text(reproduction(self.spec, [self.spec.threads or len(d.cores) for d in self.bench.devices]))
        self.bench.keep(script, "text/x-python")
        if not reads_files(self.spec):
            data = self.bench.file("data.npz")
            self.reference.ask("write_data", {"file": str(data)})
            self.bench.keep(data, BINARY)

    def _gang(self, key: str, setting: Setting, make: Any, one: bool) -> Gang:
        """Ranks on the setting's devices; `one`: a single process that holds all of them."""
        devices = setting.devices[:1]
        threads = self.spec.threads
        if one and key != "reference":
            cores = tuple(core for device in setting.devices for core in device.cores)
            devices = (type(devices[0])(devices[0].name, devices[0].type, cores, devices[0].uuid),)
        gang = Gang.start(key, setting.devices if not one else devices, threads, make, self.spec.rank_timeout_s)
        gang.others = lambda: list(self.gangs.values())
        self.open.callback(gang.close)
        return gang

    def _start_all(self) -> None:
        for run in list(self.runs):
            earlier = self.restored.skipped.get(run.setting.key)
            if earlier is not None:
                self._drop(run, earlier.reason, earlier.status)
                continue
            reason = unavailable(run.setting, self.facts)
            if reason:
                self._drop(run, reason, "skipped")
                continue
            if run.is_over:
                continue
            self._say(f"starting {run.setting.key}")
            setting, started_s = run.setting, time.perf_counter()
            gang = self._gang(
                setting.key,
                setting,
                lambda rank, life, s=setting: Trainer(s, rank, life),
                setting.strategy in ONE_PROCESS,
            )
            self.gangs[setting.key] = gang
            gang.on_sign = lambda steps, loss, key=setting.key: self._progress(key, steps)  # type: ignore[misc]
            try:
                told = gang.ask("prepare", {"started_s": started_s})
                run.start_s = max(answer["start_s"] for answer in told)
                self._say(f"checking the first steps of {setting.key}")
                self.proof.check(run, gang)
                if run.setting.key in self.restored.ranks:
                    files = self.restored.ranks[run.setting.key]
                    gang.ask("resume", {"files": files, "steps": run.steps})
            except GangFailed as failure:
                self._fail(run, failure)
        self.proof.close()
        if not self.runs:
            reasons = "; ".join(f"{row.of}: {row.reason}" for row in self.result.skipped)
            raise WorkloadError(f"no strategy could run: {reasons}")

    def _load_before(self) -> Load:
        self.frequency_mhz = frequency_mhz(self.bench.cores[0])
        pids = tuple(pid for gang in self.gangs.values() for pid in gang.pids)
        return Load.now(self.bench.cores, pids)

    def _load_after(self, before: Load) -> None:
        pids = tuple(pid for gang in self.gangs.values() for pid in gang.pids)
        self.host["during"] = Load.now(self.bench.cores, pids).since(before)
        self.codes += load_codes(self.host["during"], (self.frequency_mhz, frequency_mhz(self.bench.cores[0])))

    def _train_all(self) -> None:
        """Round by round: one epoch of every strategy that is not over."""
        epochs = max(run.course.epochs for run in self.runs)
        for number in range(1, epochs + 1):
            under_way = [run for run in self.runs if not run.is_over and number > len(run.epochs)]
            for run in random.Random(f"{self.spec.seed}/{number}").sample(under_way, len(under_way)):
                self._say(f"{run.setting.key}: epoch {number} of {run.course.epochs}", begins=False)
                try:
                    if not run.is_over:  # it may have failed while another one was saved
                        self._train_epoch(run, self.gangs[run.setting.key], number)
                except GangFailed as failure:
                    self._fail(run, failure)
                self._save()

    def _train_epoch(self, run: Run, gang: Gang, number: int) -> None:
        """What is missing of an epoch, the score after it, and after the last epoch the weights."""
        self._train_steps(run, gang, number)
        if run.is_over:
            return
        epoch, run.under_way = run.under_way, None
        assert epoch is not None
        run.epochs.append(epoch)
        scored = gang.ask("evaluate")
        epoch.right, epoch.eval_samples = (sum(answer[what] for answer in scored) for what in ("right", "samples"))
        epoch.eval_s = max(answer["seconds"] for answer in scored)
        accuracy = epoch.right / epoch.eval_samples
        loss = epoch_loss(run, epoch)
        print(f"  {run.setting.key}: {epoch.seconds:.2f} s, loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
        # A recorded run goes on: its losses are what was asked for.
        is_over = number == run.course.epochs or (run.diverged and not self.spec.record_steps)
        if self.spec.target_accuracy is not None and accuracy >= self.spec.target_accuracy:
            run.reached_s, is_over = run.trained_s[-1], True
        if is_over and not run.at:
            self._keep_weights(run, gang)
        run.is_over = is_over

    def _train_steps(self, run: Run, gang: Gang, number: int) -> None:
        """An epoch's steps, in parts where it is long, between which it is saved."""
        epoch = run.under_way = run.under_way or Epoch(number)
        steps = run.course.steps_in(number)
        while epoch.steps < steps:
            first = epoch.steps
            last = min(steps, first + self._steps_at_once(run, epoch))
            told = gang.ask("train_epoch", {"epoch": number, "first": first, "last": last})
            epoch.add(told)
            run.peak_bytes = [peak for answer in told for peak in answer["peak_bytes"]]
            run.diverged = run.diverged or any(answer["diverged"] for answer in told)
            self.steps_told[run.setting.key] = run.steps
            if run.diverged and not self.spec.record_steps:
                return
            if epoch.steps < steps:
                self._save()
                if run.is_over:
                    return

    def _steps_at_once(self, run: Run, epoch: Epoch) -> int:
        """So many as take about the time after which a job is to be saved."""
        if self.bench.store is None:
            return run.course.steps_per_epoch
        known = epoch if epoch.steps else run.epochs[-1] if run.epochs else None
        step_s = known.seconds / known.steps if known else run.first_step_s
        return max(1, int(self.bench.checkpoint_s / (step_s or self.bench.checkpoint_s)))

    def _save(self) -> None:
        try:
            self.saver.save(self.gangs, self.result.skipped)
        except GangFailed as failure:
            self._fail(next(run for run in self.runs if run.setting.key == failure.strategy), failure)

    def _keep_weights(self, run: Run, gang: Gang) -> None:
        told = gang.ask("save")
        run.checks.append(replicas_row(run, told[0]["spread"], run.steps))
        run.diverged = run.diverged or not all(answer["finite"] for answer in told)
        run.weights = self.bench.file(f"{run.name}.safetensors")
        merge([Path(answer["file"]) for answer in told], run.weights)

    def _keep_all(self) -> None:
        (self.labels,) = self.reference.ask("test_file", {"file": str(self.bench.file("test.pt"))})
        for run in self.runs:
            if run.weights is not None:
                self.bench.keep(run.weights, BINARY, f"{run.name}.safetensors")

    def _export_all(self) -> None:
        """Each model as TorchScript, scored by a process without Torchstone."""
        with ExitStack() as self.open:
            first = self.runs[0].setting
            exporter = self._gang("export", first, lambda rank, life: Exporter(first), one=True)
            for run in [run for run in self.runs if run.weights is not None]:
                name = f"{run.name}.pt"
                self._say(f"exporting {name}")
                try:
                    files = {
                        "weights": str(run.weights),
                        "file": str(self.bench.file(name)),
                    }
                    exporter.ask("export", files)
                except GangFailed as failure:
                    reason = f"the model cannot be exported: {failure.reason}"
                    self.result.skipped.append(Skipped(of=name, reason=reason, status="failed"))
                    continue
                self._score(run, name)
                self.bench.keep(self.bench.file(name), BINARY)

    def _score(self, run: Run, name: str) -> None:
        output = self.bench.file(f"{name}.npz")
        program = scoring_program(name, self.spec.eval_batch_size)
        loader = self._gang("loader", run.setting, lambda rank, life: CleanLoader(), one=True)
        arguments = {"program": program, "folder": str(self.bench.folder), "inputs": str(self.bench.file("test.pt"))}
        try:
            (ours,) = loader.ask("run", {**arguments, "output": str(output)})
        except GangFailed as failure:
            raise WorkloadError(f"{name} could not be used by a process without Torchstone: {failure.reason}") from None
        assert ours == [], f"the loader is not clean: {ours}"
        right, last = right_answers(output, self.labels), run.epochs[-1]
        run.exported_accuracy = right / len(self.labels)
        # Summed in another order, samples on the border between two classes may fall to the other side; the more so
        # where training scored in bfloat16.
        border = len(self.labels) // (1000 if self.spec.dtype == "float32" else 50)
        if abs(right - last.right) > max(1, border):
            told = f"{last.right} and {right} of {len(self.labels)} right answers"
            reason = f"{name} does not do what was trained: {told} in training and after export"
            if self.facts["scores_by_batch"]:  # of BatchNorm without statistics of its own, in other batches
                self.codes.append(Code(code="scored_in_other_batches", severity="info", evidence={"of": name}))
                return
            if run.is_equal and not run.diverged:
                raise WorkloadError(reason)
            # Its replicas came apart: that is told by its checks, and is no reason to end the others.
            self.result.skipped.append(Skipped(of=name, reason=reason, status="failed"))

    def _report(self) -> None:
        report(self.result, self.runs, self.bench.file("samples.npz"))
        self.codes += remarks(self.runs, len(self.bench.devices), self.result.noise_floor) if self.runs else []
        if self.facts:  # else it ended before anything was known
            ceilings = self.bench.ceilings
            self.result.figures += [roofline_of(run, self.facts, ceilings) for run in self.runs if run.epochs]
        self.result.quality = grade(self.codes)
        self.bench.keep(self.bench.file("samples.npz"), BINARY)

    def _fail(self, run: Run, failure: GangFailed) -> None:
        if failure.kind in ("invalid_model", "data_missing"):
            raise job_error(failure) from None
        hint = _ONE_SAMPLE if "more than 1 value per channel" in failure.reason else ""
        self._drop(run, failure.reason + hint, "skipped" if failure.kind == "unavailable" else "failed")
        if not any(not r.is_over or r.epochs for r in self.runs):
            raise job_error(failure) from None

    def _drop(self, run: Run, reason: str, status: Any) -> None:
        """This strategy takes no further part; what it measured stays."""
        print(f"  {run.setting.key}: {status}: {reason}", flush=True)
        self.result.skipped.append(Skipped(of=run.setting.key, reason=reason, status=status))
        gang = self.gangs.pop(run.setting.key, None)
        if gang is not None:
            gang.close()
        run.is_over = True
        if not run.epochs:
            self.runs.remove(run)

    def _progress(self, key: str, steps: int) -> None:
        self.steps_told[key] = steps
        total = sum(run.course.total_steps for run in self.runs)
        done = sum(self.steps_told.values())
        ours = done - self.steps_restored
        eta_s = (time.perf_counter() - self.begun_s) / ours * (total - done) if ours > 0 else None
        self.bench.progress(done, total, "steps", eta_s, f"{key}, step {steps}")

    def _say(self, message: str, begins: bool = True) -> None:
        print(message, flush=True)
        done = sum(self.steps_told.values())
        total = sum(run.course.total_steps for run in self.runs)
        self.bench.progress(done, total, "steps", None, message, begins=begins)
