"""The `async` experiment: who waits for whom, between numpy and torch, front end and device, branch and branch.

    result = run(parse_spec({"kind": "async", "size": 256}), bench)

Its parts are in `worker.asynchrony`, each with its own contestants and its share of the budget. Where operations are
synchronous, as on CPU devices, the result says so, and measures what is asynchronous there.
"""

from __future__ import annotations

from collections.abc import Callable

from torchstone.asynchrony import AsyncSpec, Part
from torchstone.errors import JobError
from torchstone.results import Result
from worker.asynchrony import barriers, dispatch, graph, numpy_vs_torch
from worker.asynchrony.reproduce import reproduction
from worker.asynchrony.stage import Stage
from worker.bench import Bench
from worker.measure.archive import write_archive
from worker.measure.quality import grade, thread_codes
from worker.measure.statistics import RESAMPLES

PARTS: dict[Part, Callable[[Stage], None]] = {
    Part.numpy_vs_torch: numpy_vs_torch.measure,
    Part.dispatch: dispatch.measure,
    Part.barriers: barriers.measure,
    Part.graph: graph.measure,
}


def run(spec: AsyncSpec, bench: Bench) -> Result:
    """Measure the parts of `spec` on the leased devices. Raises JobError, with what was measured until then."""
    stage = Stage(spec, bench, Result())
    _reproduce(stage)
    stage.codes += thread_codes(stage.threads, bench.cores)
    bench.step_aside()  # nothing but contestants on the cores that are measured
    try:
        for part in spec.parts:
            PARTS[part](stage)
            stage.part_done()
    except JobError as error:
        _finish(stage)
        error.partial = stage.result.to_json()
        raise
    _finish(stage)
    return stage.result


def _reproduce(stage: Stage) -> None:
    script = stage.bench.file("reproduce.py")
    sizes, branches = dispatch.sizes_up_to(stage.spec.size), graph.branches_of(stage)
    script.write_text(reproduction(stage.spec, stage.threads, str(stage.device), branches, sizes))
    stage.bench.keep(script, "text/x-python")


def _finish(stage: Stage) -> None:
    """The rows that are about all parts, and the raw samples."""
    result, bench = stage.result, stage.bench
    result.tables.insert(0, stage.findings())
    result.noise_floor = max(stage.floors, default=None)
    result.quality = grade(stage.codes)
    samples = bench.file("samples.npz")
    write_archive(samples, stage.races, {"resamples": RESAMPLES, "unit": "s"}, stage.arrays)
    bench.keep(samples, "application/octet-stream")
