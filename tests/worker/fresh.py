"""Experiments in a process like a job's own: forked from a server that has torch imported and never ran an operation.

    outcome = run_fresh({"kind": "jit", "model": {"preset": "mlp"}, "budget_s": 0.2}, tmp_path)
    outcome.result.comparisons, outcome.kept["script.pt"], outcome.events

pytest's own process may have run tensor operations, after which a fork of it hangs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torchstone.results import Result
from torchstone.specs import parse_spec
from worker.bench import Bench
from worker.workloads import workload


@dataclass
class Outcome:
    """What a run gave back."""

    result: Result
    kept: dict[str, Path]
    events: list[dict[str, Any]]


def call_fresh(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """`function(*arguments)` in a fresh process; what it returns, or the exception that it raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["worker.preload_compiler"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, partial(function, *arguments, **named)))
    process.start()
    theirs.close()
    try:
        raised, value = ours.recv()
    finally:
        process.join()
    if raised:
        raise value
    return value


def run_fresh(spec: dict[str, Any], folder: Path) -> Outcome:
    """Run an experiment as a worker's child process would."""
    text, kept, events = call_fresh(_run, spec, folder)
    return Outcome(Result.model_validate_json(text), {f["name"]: Path(f["path"]) for f in kept}, events)


def _answer(pipe: Connection, call: Callable[[], Any]) -> None:
    try:
        pipe.send((False, call()))
    except Exception as error:
        pipe.send((True, error))


def _run(spec: dict[str, Any], folder: Path) -> tuple[str, list[dict[str, str]], list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    bench = Bench.local(folder, devices=spec.get("devices", {}).get("count", 1))
    bench.send = events.append
    result = workload(spec["kind"])(parse_spec(spec), bench)
    return result.to_json(), bench.kept, events
