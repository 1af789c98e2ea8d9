"""What a job saves on the real worker: it is there for the next attempt, and gone with the job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from tests.torchstone.store_samples import claim, submit, up
from tests.worker.test_host import Bed, bed, launcher, until
from torchstone.jobs import State
from torchstone.settings import Settings
from torchstone.store import Store, checkpoints, jobs, leases, retention
from torchstone.store.artifacts import Blobs
from worker.checkpoints import CheckpointKeeper, release

__all__ = ["bed", "launcher"]  # fixtures


def saved(bed: Bed, job_id: str) -> list[checkpoints.Part]:
    with bed.store.read() as conn:
        return checkpoints.of(conn, job_id)


def saved_and_canceled(bed: Bed) -> str:
    """A job that saved itself, and was cancelled while no worker was up."""
    bed.open()
    job_id = bed.submit("save")
    until(lambda: bed.log(job_id).count("stored True") == 2)
    bed.shut()
    with bed.store.write() as conn:
        jobs.cancel(conn, job_id)
    return job_id


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
    until(lambda: not saved(bed, job_id) and not blobs(bed))


def test_what_a_job_saved_that_ended_elsewhere_is_deleted_too(bed: Bed) -> None:
    job_id = saved_and_canceled(bed)
    assert bed.job(job_id)["state"] == "canceled" and saved(bed, job_id)
    bed.open()
    until(lambda: not saved(bed, job_id) and not blobs(bed))


def test_a_bucket_that_does_not_answer_holds_no_lease_up(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a job whose checkpoint can go, and a bucket that is asked to delete it and says nothing
    saved_and_canceled(bed)
    asked, answers = threading.Event(), threading.Event()

    def delete(self: Blobs, sha256: str) -> None:
        asked.set()
        answers.wait(30)

    monkeypatch.setattr(Blobs, "delete", delete)
    host = bed.open()
    assert asked.wait(10)
    # When the keeper has had time for many rounds, then it made them
    for _ in range(3):
        before_s = host._renewed_s
        until(lambda before_s=before_s: host._renewed_s > before_s, within_s=20)
    assert bed.ended(bed.submit("answer forty-two"))["state"] == "succeeded"
    answers.set()


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


class Died(BaseException):
    """The worker ends here: nothing after it is run."""


class Shelf:
    """A job that is held, and what saves it."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.folder, self.blobs = folder, Blobs((folder / "blobs").as_uri())
        submit(store)
        self.store, self.holder = store, claim(store, up(store)).holder
        self.keeper = CheckpointKeeper(store, self.blobs, self.holder, folder)

    def save(self, data: bytes) -> bool:
        path = self.folder / "part"
        path.write_bytes(data)
        return self.keeper._store([("ddp", path)])

    def fetched(self) -> bytes:
        files, fault = self.keeper.fetch()
        assert fault is None
        return files["ddp"].read_bytes()

    def stored(self) -> list[bytes]:
        return [path.read_bytes() for path in (self.folder / "blobs").rglob("*") if path.is_file()]

    def collect(self) -> None:
        retention.collect(self.store, self.blobs, Settings(data=self.folder))

    def end(self) -> None:
        with self.store.write() as conn:
            leases.finish(conn, self.holder, State.failed)


@pytest.fixture
def shelf(store: Store, tmp_path: Path) -> Shelf:
    return Shelf(store, tmp_path)


def test_what_a_worker_stored_that_died_before_it_was_named_is_collected(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker that dies once the bytes are stored
    assert shelf.save(b"one")

    def die(*_: Any) -> None:
        raise Died

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(checkpoints, "replace", die)
        shelf.save(b"two")
    # When bytes without a name are collected, then they stay while the attempt may still name them
    shelf.collect()
    assert sorted(shelf.stored()) == [b"one", b"two"]
    # And go once it cannot
    shelf.end()
    shelf.collect()
    assert shelf.stored() == [b"one"]
    release(shelf.store, shelf.blobs)
    shelf.collect()
    assert shelf.stored() == []


@pytest.mark.parametrize("is_made", [False, True])
def test_a_commit_whose_answer_is_lost_costs_no_checkpoint(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    # Given a database that goes away in the commit which names the second checkpoint, before or after it was made
    assert shelf.save(b"one")
    real = shelf.store.write
    left = iter([False, True])

    @contextmanager
    def write() -> Iterator[Connection]:
        is_lost = next(left, False)
        with real() as conn:
            yield conn
            if is_lost and not is_made:
                raise OperationalError("COMMIT", None, Exception("gone"))
        if is_lost:
            raise OperationalError("COMMIT", None, Exception("gone"))

    with monkeypatch.context() as patch:
        patch.setattr(shelf.store, "write", write)
        assert not shelf.save(b"two"), "it is not certain"
    # Then what the database names is there, and the next one replaces it
    shelf.collect()
    assert shelf.fetched() == (b"two" if is_made else b"one")
    assert shelf.save(b"three")
    assert shelf.fetched() == b"three"
    shelf.end()
    release(shelf.store, shelf.blobs)
    shelf.collect()
    assert shelf.stored() == []


def test_a_job_may_save_again_as_soon_as_it_was_told(shelf: Shelf) -> None:
    answers: list[bool] = []

    def take() -> None:
        path = shelf.folder / f"part-{len(answers)}"
        path.write_bytes(path.name.encode())
        shelf.keeper.take({"parts": [{"name": "ddp", "path": str(path)}]}, told)

    def told(answer: dict[str, bool]) -> None:
        answers.append(answer["stored"])
        if len(answers) < 3:
            take()

    take()
    until(lambda: len(answers) == 3)
    assert answers == [True, True, True] and shelf.fetched() == b"part-2"


def test_an_attempt_that_lost_its_job_leaves_nothing_behind(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an attempt that loses its job while the bytes are on their way, and a collection in between
    put = shelf.blobs.put

    def slow(*given: Any) -> tuple[str, int]:
        shelf.end()
        shelf.collect()
        return put(*given)

    monkeypatch.setattr(shelf.blobs, "put", slow)
    assert not shelf.save(b"one")
    assert shelf.stored() == []
