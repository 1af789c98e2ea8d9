"""Ranks that die, stand still or raise in the middle of an epoch: who is blamed, how soon, and what is left."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.worker.fresh import call_fresh
from torchstone.errors import JobError
from torchstone.results import Result
from torchstone.specs import parse_spec
from worker import processes
from worker.bench import Bench
from worker.workloads import train

LONG: dict[str, Any] = {
    "kind": "train",
    "model": {"preset": "mlp"},
    "dataset": {"name": "digits"},
    "strategies": ["single", "ddp"],
    "devices": {"count": 2},
    "epochs": 10_000,
    "batch_size": 100,
    "rank_timeout_s": 3,
}


@dataclass
class End:
    """How a job ended whose rank was sent a signal."""

    code: str
    message: str
    more: dict[str, Any]
    partial: str
    seconds: float
    left: list[int]


def _run(spec: dict[str, Any], folder: Path, number: int, name: str) -> End:
    """Run a job here and, once every strategy is in its second epoch, send the signal to the process of that name."""
    processes.become_subreaper()
    sent_s: list[float] = []

    def look(event: dict[str, Any]) -> None:
        if event["type"] != "progress" or sent_s or not event["progress"]["message"].startswith("ddp, step"):
            return
        if int(event["progress"]["message"].split()[-1]) < 16:
            return
        for pid in processes.children(os.getpid()):
            if Path(f"/proc/{pid}/comm").read_text().strip() == f"ts {name}":
                os.kill(pid, number)
                sent_s.append(time.monotonic())

    bench = Bench.local(folder, devices=2)
    bench.send = look
    with pytest.raises(JobError) as caught:
        train.run(parse_spec(spec), bench)  # type: ignore[arg-type]
    assert sent_s, "the job ended before the signal was sent"
    seconds = time.monotonic() - sent_s[0]
    left = [pid for pid in processes.descendants(os.getpid()) if processes.is_alive(pid)]
    error = caught.value
    return End(error.code, str(error), error.more, error.partial or "", seconds, left)


@pytest.mark.parametrize(
    ("number", "name", "cause"),
    [
        (signal.SIGKILL, "ddp:1", "was killed by SIGKILL"),
        (signal.SIGTERM, "ddp:0", "was killed by SIGTERM"),
        (signal.SIGSTOP, "ddp:1", "it is stopped"),
        (signal.SIGKILL, "single:0", "was killed by SIGKILL"),
    ],
)
def test_a_lost_rank_ends_the_job_by_name(number: int, name: str, cause: str, tmp_path: Path) -> None:
    end: End = call_fresh(_run, LONG, tmp_path, number, name)
    strategy, rank = name.split(":")
    assert end.code == "rank_lost"
    assert end.more == {"rank": int(rank)}
    assert f"rank {rank} of {strategy}" in end.message and cause in end.message
    assert end.seconds < 10
    assert end.left == []
    partial = Result.model_validate_json(end.partial)
    assert {c.of for c in partial.checks} == {"single", "ddp"}
    assert next(t.n for t in partial.timings if (t.name, t.of) == ("epoch", "ddp")) >= 1
