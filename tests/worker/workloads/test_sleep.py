"""The diagnostic `sleep`: it waits, hands over a file, and refuses to run twice at a time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from torchstone.errors import InvalidRequest, WorkloadError
from torchstone.specs import KINDS, SleepSpec, parse_spec
from worker.bench import Bench
from worker.workloads import MODULES, sleep


def spec(**fields: object) -> SleepSpec:
    found = parse_spec({"kind": "sleep", **fields}, diagnostics=True)
    assert isinstance(found, SleepSpec)
    return found


def test_it_is_accepted_only_where_diagnostics_are() -> None:
    with pytest.raises(InvalidRequest, match="unknown kind 'sleep'"):
        parse_spec({"kind": "sleep"})
    assert "sleep" not in KINDS and set(MODULES) == {*KINDS, "sleep"}


def test_it_waits_and_says_for_how_long(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    result = sleep.run(spec(seconds=0.2), Bench.local(tmp_path))
    [figure] = result.figures
    assert figure.value is not None and 0.2 <= figure.value <= time.monotonic() - begin_s


def test_it_hands_over_a_file_that_no_other_job_made(tmp_path: Path) -> None:
    contents = []
    for job_id in ("one", "two"):
        bench = Bench(job_id, 1, "h", [], tmp_path)
        sleep.run(spec(behavior="write", megabytes=2), bench)
        [kept] = bench.kept
        contents.append(Path(kept["path"]).read_bytes())
    assert len(contents[0]) == len(contents[1]) == 2_000_000
    assert contents[0] != contents[1]


def test_a_second_process_for_the_same_job_is_noticed(tmp_path: Path) -> None:
    bench = Bench("same", 1, "h", [], tmp_path)
    with sleep._alone("same"), pytest.raises(WorkloadError, match="another process runs this very job"):
        sleep.run(spec(), bench)
    sleep.run(spec(), bench)
