"""The `hardware` experiment: what this machine really gives, a probe for each of its parts.

    result = run(parse_spec({"kind": "hardware", "probes": ["memory", "gemm"]}), bench)

Each probe runs in a process of its own that was forked from this one, one after another: a probe that crashes, or takes
far longer than its share of the time, costs its own figures only. What a probe leaves of its share, the later ones get.

This process never runs a tensor operation; see `worker.hardware.probe` for what a probe is.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchstone.ceilings import STREAM
from torchstone.results import Check, Code, Curve, Figure, Result, Skipped, Table
from torchstone.specs import HardwareSpec
from worker.bench import Bench
from worker.devices import usable_cores
from worker.hardware.latencies import latency_table
from worker.hardware.probe import ProbeBench
from worker.hardware.reproduce import reproduction
from worker.hardware.table import SHARES, probe
from worker.measure.contestant import Contestant, ContestantFailed
from worker.measure.environment import Load, frequency_mhz, host_facts
from worker.measure.quality import grade, load_codes

UNLIMITED_BYTES = 4 << 30
"""What probes count with where nobody says how much memory a job may take."""
PATIENCE = 3.0
PATIENCE_S = 20.0
"""A probe that takes so many times its share, and so much more, is ended."""
STEADY = 0.75
"""A ceiling whose median repeat is below this share of its best was measured on a machine that was not quiet."""
CEILINGS = {*(("memory", name) for name in STREAM), ("gemm", "gemm")}
"""What a roofline is drawn from."""


def run(spec: HardwareSpec, bench: Bench) -> Result:
    """Measure what `spec` names on the leased devices."""
    return Experiment(spec, bench).run()


@dataclass
class Prober:
    """What lives in a probe's process."""

    name: str
    bench: ProbeBench

    def run(self) -> dict[str, Any]:
        """The probe's report, as JSON can carry it."""
        report = probe(self.name)(self.bench)
        return {
            "figures": [reading.figure().model_dump() for reading in report.readings],
            "curves": [row.model_dump() for row in report.curves],
            "checks": [row.model_dump() for row in report.checks],
            "tables": [row.model_dump() for row in report.tables],
            "skipped": [row.model_dump() for row in report.skipped],
            "samples": report.samples,
            "facts": report.facts,
        }


class Experiment:
    """One job under way."""

    def __init__(self, spec: HardwareSpec, bench: Bench) -> None:
        self.spec, self.bench = spec, bench
        self.result = Result()
        self.codes: list[Code] = []
        self.samples: dict[str, list[float]] = {}
        usable = set(usable_cores())
        # The job's cores as they are leased; never more than a container's quota lets run at once.
        self.cores = tuple(core for core in bench.cores if core in usable) or bench.cores

    def run(self) -> Result:
        self._describe()
        shares = {name.value: SHARES[name.value] for name in self.spec.probes}
        end_s = time.perf_counter() + self.spec.budget_s
        before = Load.now(self.cores, children=True)
        frequency_before_mhz = frequency_mhz(self.cores[0])
        for number, name in enumerate(list(shares)):
            left_s = max(end_s - time.perf_counter(), 0.02 * self.spec.budget_s)
            self._probe(name, left_s * shares[name] / sum(shares.values()), number)
            del shares[name]
        self.host["during"] = Load.now(self.cores, children=True).since(before)
        self.codes += load_codes(self.host["during"], (frequency_before_mhz, frequency_mhz(self.cores[0])))
        self.bench.progress(len(self.spec.probes), len(self.spec.probes), "probes")
        self._judge()
        return self.result

    def _describe(self) -> None:
        self.host = {"name": self.bench.host, **host_facts(self.cores), "seed": self.spec.seed}
        self.host["devices"] = [asdict(device) for device in self.bench.devices]
        self.result.environment = {"hosts": [self.host]}
        script = self.bench.file("reproduce.py")
        script.write_text(reproduction(len(self.cores)))
        self.bench.keep(script, "text/x-python")

    def _probe(self, name: str, budget_s: float, number: int) -> None:
        folder = self.bench.file(f"probe-{name}")
        folder.mkdir()
        print(f"{name}, for about {budget_s:.1f} s", flush=True)
        self._tell(number, name)
        prober = Prober(name, self._bench_of(name, folder, budget_s, number))
        begun_s = time.perf_counter()
        process = Contestant.start(name, lambda: prober, self.cores, len(self.cores))
        try:
            process.send("run")
            if not process.pipe.poll(PATIENCE * budget_s + PATIENCE_S):
                reason = f"it was ended after {time.perf_counter() - begun_s:.0f} s; its share was {budget_s:.1f} s"
                raise ContestantFailed(name, "error", reason)
            self._take(name, process.answer())
        except ContestantFailed as failure:
            print(f"  {name} failed: {failure.reason}", flush=True)
            self.result.skipped.append(Skipped(of=name, reason=failure.reason, status="failed"))
            self.codes.append(Code(code="probe_failed", severity="warning", evidence={"of": name}))
        finally:
            process.close()
            shutil.rmtree(folder, ignore_errors=True)
        print(f"  {time.perf_counter() - begun_s:.1f} s", flush=True)

    def _bench_of(self, name: str, folder: Path, budget_s: float, number: int) -> ProbeBench:
        return ProbeBench(
            cores=self.cores,
            devices=tuple(self.bench.devices),
            folder=folder,
            memory_bytes=self.bench.memory_limit_bytes or UNLIMITED_BYTES,
            budget_s=budget_s,
            service_url=self.bench.service_url,
            seed=self.spec.seed,
            progress=lambda message: self._tell(number, f"{name}: {message}"),
        )

    def _tell(self, number: int, message: str) -> None:
        self.bench.progress(number, len(self.spec.probes), "probes", None, message, begins=True)

    def _take(self, name: str, told: dict[str, Any]) -> None:
        result = self.result
        result.figures += [Figure.model_validate(row) for row in told["figures"]]
        result.curves += [Curve.model_validate(row) for row in told["curves"]]
        result.checks += [Check.model_validate(row) for row in told["checks"]]
        result.tables += [Table.model_validate(row) for row in told["tables"]]
        result.skipped += [Skipped.model_validate(row) for row in told["skipped"]]
        self.samples |= told["samples"]
        self.host.setdefault("probes", {})[name] = told["facts"]

    def _judge(self) -> None:
        result = self.result
        wrong = [{"of": check.of, "name": check.name, "at": check.at} for check in result.checks if not check.passed]
        if wrong:
            self.codes.append(Code(code="wrong_content", severity="error", evidence={"checks": wrong}))
        shaky = [row for row in result.figures if (row.of, row.name) in CEILINGS and _is_shaky(row)]
        if shaky:
            evidence = {"figures": [{"name": row.name, "at": row.at} for row in shaky], "below": STEADY}
            self.codes.append(Code(code="unsteady", severity="warning", evidence=evidence))
        if not any(row.value is not None for row in result.figures):
            self.codes.append(Code(code="nothing_measured", severity="error", evidence={"probes": self.spec.probes}))
        result.tables.append(latency_table(result.figures, self.spec.probes))
        result.quality = grade(self.codes)
        arrays: dict[str, Any] = {key: np.array(row) for key, row in self.samples.items()}
        np.savez(self.bench.file("samples.npz"), **arrays)
        self.bench.keep(self.bench.file("samples.npz"), "application/octet-stream")


def _is_shaky(row: Figure) -> bool:
    median = (row.model_extra or {}).get("median")
    return bool(row.value and median and median < STEADY * row.value)
