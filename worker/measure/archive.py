"""The raw samples of a job as one file, samples.npz, from which every published statistic recomputes.

    archive = np.load("samples.npz")
    archive["script/1"]              # seconds per call, one sample a round; row k of all contestants is round k
    archive["script/1/warm_up"]      # seconds per call while warming up, first to last
    archive["script/1/calls"]        # calls that each sample is the mean of
    json.loads(archive["meta"].item())["1"]["alpha"]      # what the interval of point "1" was computed with

Keys are CONTESTANT/POINT; the point is the batch size; POINT/set_aside is a doubtful heat that was run once more.
`ci95` of a comparison is
`worker.measure.statistics.compare(archive["script/1"], archive["eager/1"], alpha=alpha, seed=seed)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson

from worker.measure.race import Plan, Record


def write_archive(
    path: Path, races: dict[str, tuple[Record, Plan]], more: dict[str, Any], others: dict[str, Any] | None = None
) -> None:
    """Write the samples of every race, by its point, `more` facts, and `others`' samples, to `path`."""
    arrays: dict[str, Any] = dict(others or {})
    meta: dict[str, Any] = dict(more)
    for key, (record, plan) in races.items():
        meta[key] = {
            "baseline": plan.baseline,
            "alpha": record.alpha,
            "seed": plan.seed,
            "stopped_by": record.stopped_by,
            "rounds": record.rounds,
            "spent_s": record.spent_s,
            "first_call_s": record.first_call_s,
        }
        for name, seconds in record.seconds.items():
            arrays[f"{name}/{key}"] = seconds
            arrays[f"{name}/{key}/returned"] = record.returned[name]
            if name in record.device:
                arrays[f"{name}/{key}/device"] = record.device[name]
            arrays[f"{name}/{key}/warm_up"] = record.warm_up[name]
            arrays[f"{name}/{key}/calls"] = record.calls[name]
    arrays["meta"] = np.array(orjson.dumps(meta).decode())
    np.savez(path, **arrays)
