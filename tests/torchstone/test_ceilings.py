"""A host's ceilings: which report counts, and which figure a result is set against."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torchstone.store_samples import claim, submit, up
from torchstone.ceilings import Ceiling, Ceilings, Reason, Report, document
from torchstone.jobs import State
from torchstone.results import Figure, Quality, Result
from torchstone.specs import parse_spec
from torchstone.store import Store, jobs, leases, reports


def figure(of: str, name: str, value: float | None, unit: str = "B/s", **at: Any) -> Figure:
    return Figure(name=name, of=of, at=at, value=value, unit=unit)


def result(grade: str, *figures: Figure) -> Result:
    return Result(figures=list(figures), quality=Quality(grade=grade))  # type: ignore[arg-type]


def report(job_id: str, grade: str, *figures: Figure) -> Report:
    return Report(job_id, "2026-11-29T20:03:13.123456Z", result(grade, *figures).model_dump())


MEMORY = (
    figure("memory", "stream_copy", 10e9, cores=1),
    figure("memory", "stream_triad", 12e9, cores=1),
    figure("memory", "stream_triad", 20e9, cores=2),
    figure("memory", "latency", 1e-7, "s", cores=1),
)
GEMM = figure("gemm", "gemm", 80e9, "FLOP/s", cores=2, device_type="cpu", dtype="float32")


def test_each_probe_counts_as_the_newest_fit_report_has_it() -> None:
    newer = figure("memory", "stream_triad", 22e9, cores=2)
    found = document(
        "a",
        [report("3", "invalid", GEMM), report("2", "valid", newer), report("1", "valid", *MEMORY, GEMM)],
    )
    assert found is not None and (found["job"], found["grade"], found["host"]) == ("2", "valid", "a")
    assert [(row["of"], row["value"], row["job"]) for row in found["ceilings"]] == [
        ("memory", 22e9, "2"),
        ("gemm", 80e9, "1"),
    ]


def test_a_disturbed_report_lowers_no_roof_and_is_one_where_there_is_no_other() -> None:
    disturbed = report("2", "suspect", figure("memory", "stream_triad", 5e9, cores=2), GEMM)
    found = document("a", [disturbed, report("1", "valid", *MEMORY)])
    assert found is not None and (found["job"], found["grade"]) == ("1", "valid")
    assert [(row["of"], row["job"], row["grade"]) for row in found["ceilings"]][-2:] == [
        ("memory", "1", "valid"),
        ("gemm", "2", "suspect"),
    ]


def test_no_fit_report_is_none() -> None:
    assert document("a", []) is None
    assert document("a", [report("1", "invalid", GEMM)]) is None


def test_a_result_is_set_against_as_many_cores_as_it_had() -> None:
    ceilings = Ceilings(document("a", [report("1", "valid", *MEMORY, GEMM)]))
    where = {"dtype": "float32", "device_type": "cpu"}
    assert ceilings.find("B/s", **where, cores=1) == Ceiling(12e9, "B/s", "stream_triad", "1", "valid")
    assert ceilings.find("FLOP/s", **where, cores=2) == Ceiling(80e9, "FLOP/s", "gemm", "1", "valid")
    lacking = ceilings.find("FLOP/s", **where, cores=1)
    assert isinstance(lacking, Reason) and "1 cores, but with 2" in lacking.text
    other = ceilings.find("FLOP/s", dtype="bfloat16", device_type="cpu", cores=2)
    assert isinstance(other, Reason) and "bfloat16" in other.text


def test_more_cores_have_no_lower_roof_than_fewer() -> None:
    """Where those of two were measured on a busy machine: one reached more, and two can too."""
    disturbed = figure("memory", "stream_add", 3e9, cores=2)
    ceilings = Ceilings(document("a", [report("1", "suspect", MEMORY[1], disturbed)]))
    found = ceilings.find("B/s", dtype="float32", device_type="cpu", cores=2)
    assert found == Ceiling(12e9, "B/s", "stream_triad", "1", "suspect")
    assert isinstance(ceilings.find("B/s", dtype="float32", device_type="cpu", cores=3), Reason)


def test_several_gpus_count_as_so_many_of_the_slowest() -> None:
    rows = [figure("device_device", "device_copy", value, device=f"cuda:{i}") for i, value in enumerate((3e12, 2e12))]
    found = Ceilings(document("a", [report("1", "valid", *rows)]))
    ceiling = found.find("B/s", dtype="float32", device_type="cuda", cores=8, devices=2)
    assert isinstance(ceiling, Ceiling) and ceiling.value == 4e12


def test_without_a_report_it_is_said_how_to_have_one() -> None:
    found = Ceilings(None).find("B/s", dtype="float32", device_type="cpu", cores=1)
    assert isinstance(found, Reason) and '{"kind": "hardware"}' in found.text


def test_only_reports_of_the_host_itself_count(store: Store) -> None:
    def run(host_name: str, grade: str, *figures: Figure) -> str:
        with store.write() as conn:
            [stored] = jobs.insert_many(conn, [jobs.NewJob.of(parse_spec({"kind": "hardware"}))])
        claimed = claim(store, up(store, host_name))
        with store.write() as conn:
            text = result(grade, *figures).to_json()
            leases.finish(conn, claimed.holder, State.succeeded, result=text)
        return stored.job_id

    first = run("a", "valid", *MEMORY)
    run("a", "invalid", GEMM)
    other = run("b", "valid", GEMM)
    submit(store)
    with store.read() as conn:
        ours, theirs, none = (reports.ceilings(conn, name) for name in ("a", "b", "c"))
    assert ours is not None and ours["job"] == first and {row["of"] for row in ours["ceilings"]} == {"memory"}
    assert theirs is not None and theirs["job"] == other and none is None


@pytest.mark.parametrize(
    ("fields", "fault"),
    [({"probes": []}, "probes"), ({"probes": ["memory", "memory"]}, "once"), ({"probes": ["tape"]}, "probes/0")],
    ids=["none", "twice", "unknown"],
)
def test_wrong_specs_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(Exception, match=fault):
        parse_spec({"kind": "hardware", **fields})


def test_a_hardware_job_has_the_machine_to_itself_and_measures_everything() -> None:
    spec = parse_spec({"kind": "hardware"})
    assert spec.isolation == "host" and len(spec.probes) == 10  # type: ignore[union-attr]
