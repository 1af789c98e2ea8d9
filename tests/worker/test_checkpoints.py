"""What a job saves on the real worker: it is there for the next attempt, and gone with the job."""

from __future__ import annotations

from pathlib import Path

from tests.worker.test_host import Bed, bed, launcher, until
from torchstone.store import checkpoints, jobs
from worker.checkpoints import release

__all__ = ["bed", "launcher"]  # fixtures


def saved(bed: Bed, job_id: str) -> list[checkpoints.Part]:
    with bed.store.read() as conn:
        return checkpoints.of(conn, job_id)


def blobs(bed: Bed) -> list[Path]:
    return [path for path in (bed.settings.data / "artifacts").rglob("*") if path.is_file()]


def test_what_was_saved_last_is_there_for_the_next_attempt_and_gone_with_the_job(bed: Bed) -> None:
    # Given a job that has saved itself twice, and whose worker then stopped
    bed.open()
    job_id = bed.submit("save")
    until(lambda: bed.log(job_id).count("stored True") == 2)
    assert [(part.name, part.attempt) for part in saved(bed, job_id)] == [("part", 1)]
    assert len(blobs(bed)) == 1, "what was replaced is deleted"
    bed.shut()
    # When another takes over
    bed.open()
    job = bed.ended(job_id)
    # Then it finds the last of both
    assert job["result"]["environment"]["hosts"] == [{"found": {"part": "attempt 1, save 2"}}]
    until(lambda: not saved(bed, job_id))
    assert blobs(bed) == []


def test_what_a_job_saved_that_ended_elsewhere_is_deleted_too(bed: Bed) -> None:
    bed.open()
    job_id = bed.submit("save")
    until(lambda: bed.log(job_id).count("stored True") == 2)
    bed.shut()
    with bed.store.write() as conn:
        jobs.cancel(conn, job_id)
    assert bed.job(job_id)["state"] == "canceled" and saved(bed, job_id)
    host = bed.open()
    release(host.store, host.blobs)
    assert saved(bed, job_id) == [] and blobs(bed) == []


def test_a_job_goes_on_where_nothing_can_be_stored(bed: Bed) -> None:
    bed.open()
    folder = bed.settings.data / "artifacts"
    folder.rmdir()
    folder.write_text("in the way")
    job_id = bed.submit("save")
    until(lambda: bed.log(job_id).count("stored False") == 2)
    assert saved(bed, job_id) == []
    folder.unlink()
    folder.mkdir()
