"""The files of a job that has ended, where its worker stops, or the bucket or the database is away."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import OperationalError

from tests.torchstone.store_samples import claim, submit
from tests.torchstone.test_store_retention import Shelf
from tests.worker.test_host import Bed, bed, launcher, until
from torchstone.errors import SetupError, Unavailable
from torchstone.store import Store, artifacts, hosts, leases, retention
from torchstone.store.artifacts import Blobs, digest
from torchstone.store.schema import now_us, removals
from worker import deposit
from worker.checkpoints import CheckpointKeeper
from worker.deposit import Closing, Deposit
from worker.host import WorkerHost

__all__ = ["bed", "launcher"]


class Bucket:
    """Is away for the first `times` puts."""

    is_local = False

    def __init__(self, times: int) -> None:
        self.times = times

    def put(self, path: Path, sha256: str) -> tuple[str, int]:
        self.times -= 1
        if self.times >= 0:
            raise Unavailable("the artifact store cannot be used: connection refused")
        return sha256, path.stat().st_size


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "file").write_bytes(b"bytes")
    return {"name": "file", "path": str(tmp_path / "file"), "media_type": "text/plain"}


def deposit_of(store: Store, folder: Path, blobs: object, closing: threading.Event) -> Deposit:
    """Of an attempt that holds its job, with a database that is there."""
    shelf = Shelf(store, folder)
    submit(store)
    holder = claim(store, shelf.host).holder

    def persist(write: Callable[[Any], Any]) -> Any:
        with store.write() as conn:
            return write(conn)

    return Deposit(blobs, holder, persist, closing)  # type: ignore[arg-type]


def test_a_bucket_that_comes_back_gets_the_file(
    store: Store, tmp_path: Path, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deposit, "_TRY_EVERY_S", 0.01)
    [row] = deposit_of(store, tmp_path, Bucket(3), threading.Event()).store([made])
    assert (row["name"], row["bytes"]) == ("file", 5)


def test_a_bucket_that_stays_away_is_told(
    store: Store, tmp_path: Path, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deposit, "_TRY_EVERY_S", 0.01)
    monkeypatch.setattr(deposit, "BUCKET_BACK_WITHIN_S", 0.1)
    with pytest.raises(OSError, match="file: the artifact store cannot be used: connection refused"):
        deposit_of(store, tmp_path, Bucket(10**9), threading.Event()).store([made])


def test_a_stopping_worker_leaves_it_to_another_attempt(store: Store, tmp_path: Path, made: dict[str, Any]) -> None:
    closing = threading.Event()
    closing.set()
    with pytest.raises(Closing):
        deposit_of(store, tmp_path, Bucket(10**9), closing).store([made])


def test_a_stopping_worker_does_not_wait_for_bytes_that_are_being_removed(
    store: Store, tmp_path: Path, made: dict[str, Any]
) -> None:
    with store.write() as conn:
        conn.execute(insert(removals).values(sha256=digest(Path(made["path"])), since_us=now_us()))
    closing = threading.Event()
    closing.set()
    with pytest.raises(Closing):
        deposit_of(store, tmp_path, Bucket(0), closing).store([made])


def test_no_job_succeeds_without_its_files(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pin meets a database that is locked while the worker closes; the record a moment later does not."""
    host, pin, is_in_pin = bed.open(), retention.pin, threading.Event()

    def pin_too_late(*what: Any) -> bool:
        if not is_in_pin.is_set():
            is_in_pin.set()
            until(host._stopping.is_set, 30)
            locked = OperationalError("BEGIN IMMEDIATE", {}, Exception("database is locked"))
            locked.connection_invalidated = True
            raise locked
        return pin(*what)

    monkeypatch.setattr(retention, "pin", pin_too_late)
    job_id = bed.submit("answer forty-two")
    assert is_in_pin.wait(30)
    host.drain()
    bed.shut()
    job = bed.job(job_id)
    with bed.store.read() as conn:
        rows = artifacts.all_of(conn, job_id)
    assert (job["state"], job["lost"]) == ("queued", 0) or rows, job


def test_what_was_put_before_a_file_failed_is_found_again(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is taken away while its first file is put, what is loose is collected, and its next file fails."""
    host, put, stored = bed.open(), Blobs.put, []

    def put_and_fail(self: Blobs, path: Path, sha256: str) -> tuple[str, int]:
        [run] = host.runs()
        with bed.store.write() as conn:
            leases.give_back(conn, run.claim.holder, "taken away", spent=True, max_attempts=1)
        retention.collect(bed.store, host.blobs, bed.settings)
        stored.append(put(self, path, sha256)[0])
        raise OSError("the next file fails")

    monkeypatch.setattr(Blobs, "put", put_and_fail)
    bed.submit("answer unique-bytes")
    until(lambda: stored and not host.runs(), 30)
    monkeypatch.undo()
    assert host.blobs.size(stored[0]) is not None
    retention.collect(bed.store, host.blobs, bed.settings)
    assert host.blobs.size(stored[0]) is None


@pytest.mark.parametrize("bucket", ["is away", "does not answer"])
def test_a_worker_that_stops_while_a_bucket_is_away_hands_the_job_back_in_time(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    """Before whoever asked it to stop loses patience and kills it."""
    bed.settings = bed.settings.model_copy(update={"kill_grace_s": 0.0, "drain_s": 0.0})
    host, answers, is_asked = bed.open(), threading.Event(), threading.Event()

    def put(*_: Any) -> tuple[str, int]:
        is_asked.set()
        if bucket == "does not answer":
            answers.wait(60)
        raise Unavailable("the artifact store cannot be used: connection refused")

    monkeypatch.setattr(Blobs, "put", put)
    monkeypatch.setattr(Blobs, "is_local", False)
    job_id = bed.submit("answer forty-two")
    assert is_asked.wait(30)
    begin_s = time.monotonic()
    host.drain()
    host.close_but_launcher()
    assert time.monotonic() - begin_s < bed.settings.stopped_within_s
    answers.set()
    job = bed.job(job_id)
    assert (job["state"], job["lost"]) == ("queued", 0), job
    assert [attempt["outcome"] for attempt in job["attempts"]] == ["returned"]


def test_a_job_that_has_no_process_yet_is_handed_back_too(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker stops while it waits for what an earlier attempt has saved."""
    bed.settings = bed.settings.model_copy(update={"kill_grace_s": 0.0, "drain_s": 0.0})
    host, answers, is_asked = bed.open(), threading.Event(), threading.Event()

    def fetch(_: CheckpointKeeper) -> tuple[dict[str, Path], str | None]:
        is_asked.set()
        answers.wait(60)
        return {}, None

    monkeypatch.setattr(CheckpointKeeper, "fetch", fetch)
    job_id = bed.submit("answer")
    assert is_asked.wait(30)
    host.drain()
    host.close_but_launcher()
    answers.set()
    job = bed.job(job_id)
    assert (job["state"], job["lost"]) == ("queued", 0), job


def test_two_workers_of_a_machine_cannot_own_one_device(bed: Bed) -> None:
    """A gang that needs both would wait for ever, while single jobs take turns on the shared one."""
    bed.open()
    other = WorkerHost(bed.settings.model_copy(update={"host_name": "other", "devices": "cpu:0"}), bed.launcher)
    try:
        with pytest.raises(SetupError, match="cpu:0 is owned by the worker 'bed' on this machine"):
            other.open()
    finally:
        other.close_but_launcher()


def beside(bed: Bed, **changes: Any) -> WorkerHost:
    """Another worker of the machine, which has registered: what it says of itself, changed."""
    other = WorkerHost(bed.settings.model_copy(update={"host_name": "other"}), bed.launcher)
    with bed.store.write() as conn:
        hosts.register(conn, dataclasses.replace(other.host, **changes))
    return other


def test_a_silent_worker_is_in_the_way_until_its_lease_ends(bed: Bed) -> None:
    """One that was killed, whose container comes back under another name."""
    bed.settings = bed.settings.model_copy(update={"lease_s": 2.0, "heartbeat_s": 0.5, "fence_s": 1.0})
    begin_s = time.monotonic()
    beside(bed, pid=4_000_000).store.dispose()
    bed.open()
    assert time.monotonic() - begin_s > 1.5


def test_one_that_is_heard_of_again_stays_in_the_way(bed: Bed) -> None:
    other = beside(bed, pid=4_000_000)
    refused: list[SetupError] = []

    def open_it() -> None:
        try:
            bed.open()
        except SetupError as error:
            refused.append(error)

    opening = threading.Thread(target=open_it)
    opening.start()
    until(lambda: (other.work.parent / "bed" / "worker.lock").exists(), 30)
    while opening.is_alive():
        with bed.store.write() as conn:
            hosts.set_state(conn, "other", other.host.incarnation, "up")
        opening.join(0.2)
    other.store.dispose()
    assert "is owned by the worker 'other' on this machine" in str(refused[0])


def test_workers_that_see_other_devices_under_one_name_are_told_apart_by_a_setting(bed: Bed) -> None:
    elsewhere = [{"name": "cpu:0", "type": "cpu", "cores": [1000], "uuid": None}]
    other = beside(bed, devices=elsewhere)
    other.store.dispose()
    with pytest.raises(SetupError, match=r"cpu:0 is another device here .* TORCHSTONE_MACHINE"):
        bed.open()
