"""The probe `vector`: what vector units give, torch's elementwise rates, and what a Python loop costs; one core each.

- `polynomial`: the same C loop (kernels.c: horner, 32 FLOP an element, in the nearest cache) compiled without vectors,
  and for each set of vector instructions that this CPU has.
- `elementwise`: torch operations on numbers in cache, at each ATEN_CPU_CAPABILITY that this CPU has. One that it lacks
  would end in SIGILL; torch reads the setting once, so that each has a process of its own.
- `add_10000`: the chapter's sum of two vectors by loops over a tensor's and a list's elements, and by one operation.
- `fma_latency`, `branch_miss`, `mutex`: what the chapter's table of latencies has of a core.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worker.hardware import native
from worker.hardware.native import Kernels
from worker.hardware.places import pinned
from worker.hardware.probe import ProbeBench, ProbeReport, Reading, Repeats
from worker.measure.contestant import Contestant, ContestantFailed

SCALAR = ("-O3", "-fno-tree-vectorize", "-fno-tree-slp-vectorize")
X86_FLAGS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "scalar": (SCALAR, frozenset()),
    "sse2": (("-O3",), frozenset()),
    "avx2": (("-O3", "-mavx2", "-mfma"), frozenset({"avx2", "fma"})),
    "avx512": (("-O3", "-mavx512f", "-mavx2", "-mfma", "-mprefer-vector-width=512"), frozenset({"avx512f", "fma"})),
}
"""Compiler flags of each capability, and what the CPU must have for it."""
OTHER_FLAGS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "scalar": (SCALAR, frozenset()),
    "native": (native.FASTEST, frozenset()),
}
ATEN: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "avx2": frozenset({"avx2", "fma"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}),
}
ELEMENTS = 1 << 16
OPERATIONS: dict[str, int] = {"add": 3, "mul": 3, "exp": 2, "sigmoid": 2}
"""Tensors that each reads and writes."""
LOOP = 10_000
_POINTS = 1024
_FLOP_PER_POINT = 32


def run(bench: ProbeBench) -> ProbeReport:
    """Measure it."""
    report = ProbeReport("vector")
    core, has = bench.cores[:1], cpu_flags()
    with pinned(core):
        bench.progress("the same loop with and without vectors")
        _polynomials(bench, report, has, bench.budget_s * 0.3)
        _core(bench, report)
        bench.progress("torch's elementwise operations")
        _elementwise(bench, report, has, bench.budget_s * 0.4)
        bench.progress("a Python loop")
        torch.set_num_threads(1)
        _loop(bench, report, bench.budget_s * 0.2)
    return report


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the CPU says it has, in the kernel's words."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    told = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(told.split(":", 1)[1].split())


def polynomial(x: Any) -> Any:
    """What the kernel computes, in `x`'s own precision."""
    value = np.full_like(x, 0.5)
    for index in range(16):
        value = value * x + (0.25 if index % 2 == 0 else 0.5)
    return value


def _polynomials(bench: ProbeBench, report: ProbeReport, has: frozenset[str], budget_s: float) -> None:
    variants = X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else OTHER_FLAGS
    x = np.random.default_rng(bench.seed).uniform(-1, 1, _POINTS).astype(np.float32)
    expected = polynomial(x.astype(np.float64))
    rates = {}
    for capability, (flags, needs) in variants.items():
        at = {"capability": capability}
        kernels = native.load(flags, bench.folder)
        if not needs <= has:
            report.skip(f"polynomial.{capability}", f"this CPU has no {', '.join(sorted(needs - has))}")
            continue
        if not isinstance(kernels, Kernels):
            report.skip(f"polynomial.{capability}", kernels.reason)
            continue
        y = np.zeros_like(x)
        once_s = min(kernels.horner(x, y, 1000) for _ in range(3)) / 1000
        times = max(1, int(budget_s / len(variants) / 12 / once_s))
        took = Repeats(tuple(kernels.horner(x, y, times) for _ in range(10)))
        reading = report.rate(
            "polynomial",
            took,
            flop=_FLOP_PER_POINT * _POINTS * times,
            method=f"Horner's rule in float32, {kernels.method}",
            at=at,
            working_set_bytes=x.nbytes + y.nbytes,
        )
        error = float(np.abs(y - expected).max())
        report.check("polynomial", error < 1e-5, "float64", at=at, max_abs_error=error)
        rates[capability] = reading.value or 0.0
    if "scalar" in rates:
        for capability in [name for name in rates if name != "scalar"]:
            ratio(report, "vector_speedup", rates[capability] / rates["scalar"], {"capability": capability})


def ratio(report: ProbeReport, name: str, value: float, at: dict[str, Any]) -> None:
    """Add how many times as fast one figure above is as another."""
    report.readings.append(Reading(name, report.probe, value, "1", "ratio of the figures of this probe", at))


def _core(bench: ProbeBench, report: ProbeReport) -> None:
    """What a core does one after another: dependent arithmetic, a wrong guess, a lock."""
    kernels = native.load(scratch=bench.folder)
    if not isinstance(kernels, Kernels):
        report.skip("core", kernels.reason)
        return
    count = 2_000_000
    chains = [kernels.fma_chain(count) for _ in range(8)]
    method = f"a chain of fused multiply-adds in float64, {kernels.method}"
    report.latency("fma_latency", Repeats(tuple(s for s, _ in chains)), count=count, method=method)
    report.check("fma_chain", all(value == 2.0 for _, value in chains), "the limit 2 of x/2 + 1")
    took = Repeats(tuple(kernels.mutexes(count) for _ in range(8)))
    report.latency("mutex", took, count=count, method=f"pthread lock and unlock, uncontended, {kernels.method}")

    choices = np.random.default_rng(bench.seed).integers(0, 2, 1 << 20, dtype=np.uint8)
    ordered = np.sort(choices)
    random, known = ([kernels.branches(order) for _ in range(8)] for order in (choices, ordered))
    # Half of the guesses at random choices are wrong; of ordered ones hardly any.
    extra = Repeats(tuple(max(0.0, r[0] - k[0]) for r, k in zip(random, known, strict=True)))
    method = f"random choices less the same ones sorted, half of them guessed wrong, {kernels.method}"
    report.latency("branch_miss", extra, count=choices.size // 2, method=method)
    taken = int(choices.sum())
    report.check("branches", all(t == taken for _, t in [*random, *known]), "the choices that were made")


class Elementwise:
    """torch in a process of its own, at one capability; see `Contestant`."""

    def __init__(self, capability: str) -> None:
        os.environ["ATEN_CPU_CAPABILITY"] = capability

    def rates(self, budget_s: float, seed: int) -> dict[str, Any]:
        """Seconds of each repeat of each operation, the largest error against float64, and what torch says it uses."""
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        a, b = torch.rand(ELEMENTS), torch.rand(ELEMENTS)
        out = torch.empty(ELEMENTS)
        seconds, errors = {}, {}
        for name in OPERATIONS:
            call, operands = getattr(torch, name), (a, b) if name in ("add", "mul") else (a,)
            bench = ProbeBench((), (), Path(), 0, budget_s)
            took = bench.repeat(partial(call, *operands, out=out), budget_s=budget_s, at_most=5000, warm_up=20)
            seconds[name] = took.seconds
            exact = call(*(operand.double() for operand in operands))
            errors[name] = float((out.double() - exact).abs().max())
        return {"seconds": seconds, "errors": errors, "capability": torch.backends.cpu.get_cpu_capability()}


def _elementwise(bench: ProbeBench, report: ProbeReport, has: frozenset[str], budget_s: float) -> None:
    for capability, needs in ATEN.items():
        if capability != "default" and not needs <= has:
            report.skip(f"elementwise.{capability}", f"this CPU has no {', '.join(sorted(needs - has))}")
            continue
        one = Contestant.start(
            f"aten {capability}",
            partial(Elementwise, capability),
            bench.cores[:1],
            1,
        )
        try:
            told = one.ask("rates", budget_s=budget_s / len(ATEN) / len(OPERATIONS), seed=bench.seed)
        except ContestantFailed as failure:
            report.skip(f"elementwise.{capability}", failure.reason)
            continue
        finally:
            one.close()
        for name, tensors in OPERATIONS.items():
            at = {"op": name, "capability": capability, "elements": ELEMENTS}
            report.rate(
                "elementwise",
                Repeats(tuple(told["seconds"][name])),
                bytes=tensors * ELEMENTS * 4,
                method=f"torch {torch.__version__} in float32 on 1 thread, which calls it {told['capability']}",
                at=at,
                statistic="median",
                working_set_bytes=tensors * ELEMENTS * 4,
            )
            error = told["errors"][name]
            report.check("elementwise", error < 1e-6, "float64", at=at, max_abs_error=error)


def _loop(bench: ProbeBench, report: ProbeReport, budget_s: float) -> None:
    """The chapter's: two vectors of 10,000 ones added, element by element and at once."""
    a, b, c = torch.ones(LOOP), torch.ones(LOOP), torch.zeros(LOOP)
    x, y, z = a.tolist(), b.tolist(), [0.0] * LOOP

    def over_tensors() -> None:
        for i in range(LOOP):
            c[i] = a[i] + b[i]

    def over_lists() -> None:
        for i in range(LOOP):
            z[i] = x[i] + y[i]

    ways: dict[str, Callable[[], object]] = {
        "loop over tensor elements": over_tensors,
        "loop over list elements": over_lists,
        "one operation": lambda: torch.add(a, b, out=c),
    }
    seconds = {}
    for way, call in ways.items():
        took = bench.repeat(call, budget_s=budget_s / len(ways), at_most=5000)
        at = {"way": way}
        report.latency("add_10000", took, count=1, method=f"Python {platform.python_version()}", at=at)
        seconds[way] = took.median
        found = z if way == "loop over list elements" else c.tolist()
        report.check("add_10000", found == [2.0] * LOOP, "1 + 1", at=at, bitwise=found == [2.0] * LOOP)
        c.zero_()
    for way in [way for way in ways if way.startswith("loop")]:
        ratio(report, "vectorised_over_loop", seconds[way] / seconds["one operation"], {"against": way})
