"""One attempt at one job, from claim to record: start its process, pass on what it says, store what it made.

    run = JobRun(station, claim, on_end)
    run.start()                 # a thread of its own; ends by itself, with the job's devices free again
    run.stop("canceled")

What the job prints and how far it is goes to the database twice a second at most. At the end its files are stored
first, then one transaction names them, writes the result and frees the devices. A database that is away is waited for:
the record is made when it is back, unless the lease is lost by then.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from torchstone.jobs import State
from torchstone.settings import Settings
from torchstone.specs import parse_spec
from torchstone.store import Store, claims, events, is_transient, leases, logs, reports
from torchstone.store.artifacts import Blobs
from torchstone.store.hosts import Host
from worker import alive, processes
from worker.bench import Assignment, LeasedDevice
from worker.checkpoints import CheckpointKeeper
from worker.deposit import Closing, Deposit
from worker.devices import Device, gpu_holders, usable_cores
from worker.launch import JobProcess, Launcher, Outcome
from worker.output import Output
from worker.record import completed, receipt_of, without_files
from worker.servers import preload_for

FLUSH_S = 0.5
GPU_BACK_WITHIN_S = 10.0
DATABASE_AWAY = "the database was out of reach"
SHUTTING_DOWN = "the worker is shutting down"
_SETTLE_DRAINING_S = 3.0  # less than `WorkerHost.drain` waits for the record
T = TypeVar("T")


@dataclass(frozen=True)
class Station:
    """What every run on a host works with."""

    settings: Settings
    store: Store
    blobs: Blobs
    launcher: Launcher
    devices: dict[str, Device]
    host: Host
    work: Path
    closing: threading.Event
    """Set when there is no more time to wait for anything."""
    alive: Path
    """See `worker.alive`."""
    is_overdue: Callable[[], bool]
    """Whether the worker could not renew its leases for as long as it may go without: the database is away."""


class JobRun:
    """One running attempt."""

    def __init__(self, station: Station, claim: claims.Claim, on_end: Callable[[JobRun], None]) -> None:
        """`on_end` is called from the run's own thread once the job's devices are free again."""
        self.station = station
        self.claim = claim
        self._on_end = on_end
        self.folder: Path = station.work / f"{claim.holder.job_id}-{claim.holder.attempt}"
        self.is_finished = False
        """Set once the record is made, so that the keeper does not take the freed lease for a lost one."""
        self._is_gone = True  # there is no process of it
        self._end: Callable[[Connection], object] | None = None  # its record, once there is nothing else to do
        self.log = structlog.get_logger(__name__).bind(job_id=claim.holder.job_id, attempt=claim.holder.attempt)
        self._process: JobProcess | None = None
        self._stop_reason: str | None = None
        self._lock = threading.Lock()
        self._checkpoints = CheckpointKeeper(station.store, station.blobs, claim.holder, self.folder)
        self._output = Output(station.settings.log_limit_bytes)
        self._progress: dict[str, Any] | None = None
        self._deposit = Deposit(station.blobs, claim.holder, self._persist, station.closing)
        self._neighbours: list[dict[str, Any]] = []
        self._flushed_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"run-{claim.holder.job_id[:8]}", daemon=True)

    def start(self) -> None:
        """Run in a thread of its own."""
        self._thread.start()

    def meet(self, other: JobRun) -> None:
        """`other` runs on this host at the same time: the results of both name the other."""
        for one, beside in ((self, other), (other, self)):
            held = {"job": beside.claim.holder.job_id, "devices": list(beside.claim.devices)}
            one._neighbours.append(held)

    def join(self, timeout_s: float) -> None:
        """Wait for the end, at most `timeout_s`."""
        self._thread.join(timeout_s)

    def stop(self, reason: str) -> None:
        """End the job; what follows depends on the reason (see `Outcome.stopped`)."""
        with self._lock:
            self._stop_reason = self._stop_reason or reason
            if self._process is not None:
                self._process.stop(reason)

    def hand_back(self) -> None:
        """Record the job's end, or give it back, for this run's own thread: it waits for something that does not come.

        Only where no process of it is left. Should the thread wake up later, the job is no longer its own.
        """
        if not self._is_gone or self.is_finished:
            return
        if self._end is not None:
            with contextlib.suppress(SQLAlchemyError), self.station.store.write() as conn:
                self._end(conn)
                self.is_finished = True
                return
        self._give_up(SHUTTING_DOWN, spent=False)

    def _run(self) -> None:
        # On every line that this thread logs, whoever's it is.
        holder = self.claim.holder
        structlog.contextvars.bind_contextvars(job_id=holder.job_id, attempt=holder.attempt)
        try:
            self._attempt()
        except Exception as error:
            self.log.exception("the attempt could not be carried out")
            is_database_away = isinstance(error, SQLAlchemyError) and is_transient(error)
            why = f"the worker could not run this attempt: {type(error).__name__}: {error}"
            self._give_up(DATABASE_AWAY if is_database_away else why, spent=not is_database_away)
        finally:
            self.is_finished = True
            self._checkpoints.settle(self.station.closing, 0 if self._stop_reason == "draining" else None)
            shutil.rmtree(self.folder, ignore_errors=True)
            self._on_end(self)

    def _attempt(self) -> None:
        begun_s = time.monotonic()
        self.folder.mkdir(parents=True)
        assignment = self._assignment()
        self._is_gone = False
        process = self.station.launcher.start(assignment, is_wanted=lambda: self._stop_reason is None)
        if process is None:
            self._is_gone = True
            self._end_unstarted()
            return
        with self._lock:
            self._process = process
            if self._stop_reason is not None:
                process.stop(self._stop_reason)
        self.log.info("started", pid=process.pid, devices=list(self.claim.devices))
        outcome = process.watch(
            on_output=self._output.feed,
            on_progress=self._take_progress,
            on_checkpoint=lambda event: self._checkpoints.take(event, process.reply),
            on_look=self._flush_sometimes,
            deadline_s=begun_s + self.claim.timeout_s,
            grace_s=self.station.settings.kill_grace_s,
        )
        self._see_it_gone(outcome)
        self._output.close()
        self._checkpoints.settle(self.station.closing, _SETTLE_DRAINING_S if outcome.stopped == "draining" else None)
        if outcome.stopped == "fenced":
            self.log.warning("the job was taken away; its processes are gone, nothing is recorded")
            return
        if outcome.stopped == "draining" and (outcome.message or {}).get("type") != "result":
            self._give_back(SHUTTING_DOWN, spent=False, outcome=outcome)
            return
        if outcome.message is None and alive.ended_itself(self.folder):
            if self.station.is_overdue():
                self._give_back(DATABASE_AWAY, spent=False)
            else:
                self._give_back("its worker was not heard of, so it ended itself", spent=True)
            return
        if outcome.orphaned:
            self._give_back("the forkserver died, and the job's process with it", spent=True)
            return
        self._record(outcome)

    def _see_it_gone(self, outcome: Outcome) -> None:
        """Hold the job and its devices until no process of it is left: one may be stuck in the kernel for a while."""
        receipt = outcome.receipt
        while receipt.survivors and not self.station.closing.is_set():
            self.log.error("processes would not die; their devices stay taken", pids=receipt.survivors)
            more = processes.end_group(receipt.survivors[0], 0, receipt.survivors)
            receipt.took_ms += more.took_ms
            receipt.memory_back_bytes += more.memory_back_bytes
            receipt.survivors = more.survivors
        self._is_gone = not receipt.survivors
        uuids = [uuid for name in self.claim.devices if (uuid := self.station.devices[name].uuid) is not None]
        deadline_s = time.monotonic() + GPU_BACK_WITHIN_S
        while uuids and (holders := gpu_holders(uuids, receipt.pids)):
            if time.monotonic() > deadline_s or self.station.closing.is_set():
                self.log.error("GPU memory did not come back", pids=holders)
                return
            time.sleep(0.05)

    def _end_unstarted(self) -> None:
        """It was stopped while its process was still starting."""
        if self._stop_reason == "canceled":
            self._persist(lambda conn: leases.finish(conn, self.claim.holder, State.canceled))
            self.is_finished = True
        elif self._stop_reason == "draining":
            self._give_back(SHUTTING_DOWN, spent=False)

    def _assignment(self) -> Assignment:
        spec = parse_spec(orjson.loads(self.claim.spec), diagnostics=True)
        # A report on the machine is of all that the worker owns there, when nobody else is on it.
        names = self.station.devices if spec.kind == "hardware" and self.claim.exclusive else self.claim.devices
        leased = [self.station.devices[name] for name in names]
        held = {core for device in leased for core in device.cores}
        spare = set(usable_cores()) - held if self.claim.exclusive else set()
        with self.station.store.read() as conn:
            ceilings = reports.ceilings(conn, self.station.host.name)
        saved, fault = self._checkpoints.fetch()
        return Assignment(
            job_id=self.claim.holder.job_id,
            attempt=self.claim.holder.attempt,
            host=self.station.host.name,
            spec=self.claim.spec,
            devices=tuple(LeasedDevice(d.name, d.type, d.cores, d.uuid) for d in leased),
            folder=str(self.folder),
            memory_limit_bytes=self.station.host.memory_bytes,
            data_folders=(str(self.station.settings.datasets),),
            service_url=self.station.settings.public_url,
            ceilings=ceilings,
            spare_cores=tuple(sorted(spare)),
            preload=preload_for(spec),
            saved=tuple((name, str(file)) for name, file in saved.items()),
            saved_fault=fault,
            checkpoint_s=self.station.settings.checkpoint_s,
            alive=str(self.station.alive),
            silence_s=(self.station.settings.fence_s + self.station.settings.lease_s) / 2,
        )

    def _record(self, outcome: Outcome) -> None:
        """Store the files, then the result: the job's one end."""
        state, error = self._verdict(outcome)
        message = outcome.message or {}
        files: list[dict[str, Any]] = []
        try:
            # A file that was kept twice under one name counts as it was kept last.
            made = {file["name"]: file for file in message.get("files", [])}
            files = self._deposit.store(list(made.values()))
        except Closing:
            if state is State.succeeded:
                self._give_back(SHUTTING_DOWN, spent=False, outcome=outcome)
                return
            self.log.warning("the worker closes: what the job made until it ended is not stored")
        except OSError as failure:
            state, error = without_files(state, error, f"a file of the job could not be stored: {failure}")
            self.log.warning("what the job made is not stored", error=str(failure))
        result = message.get("result")
        if result is not None:
            result = completed(result, files, self._neighbours)

        def end(conn: Connection) -> State | None:
            self._write_last_words(conn)
            receipt = receipt_of(outcome)
            if receipt is not None and leases.still_held(conn, self.claim.holder) is not None:
                events.add(conn, self.claim.holder.job_id, "killed", receipt)
            return leases.finish(
                conn, self.claim.holder, state, result=result, error=error, files=files, receipt=receipt
            )

        self._end = end
        final = self._persist(end)
        self.is_finished = True
        if final is None:
            self.log.warning("the result came too late: the job was taken away")
            self._deposit.leave()
        else:
            self.log.info("ended", state=final.value, error=error, peak_bytes=outcome.peak_bytes)

    def _verdict(self, outcome: Outcome) -> tuple[State, dict[str, Any] | None]:
        """What the job ended as, and with which error."""
        message = outcome.message
        limit_gb = self.station.host.memory_bytes / 1e9
        if outcome.stopped == "canceled":
            return State.canceled, None
        if outcome.stopped == "timed_out":
            text = f"the job ran for longer than its timeout_s of {self.claim.timeout_s:g} s"
            return State.failed, {"code": "timed_out", "message": text}
        if outcome.stopped == "out_of_memory":
            held_gb = outcome.peak_bytes / 1e9
            text = f"the job held {held_gb:.2f} GB of memory; a job on this host may take {limit_gb:.2f} GB"
            return State.failed, {"code": "out_of_memory", "message": text}
        if message is None and outcome.oom_killed and outcome.exit_code == -signal.SIGKILL:
            text = "the kernel ended the job's process because memory ran out"
            return State.failed, {"code": "out_of_memory", "message": text}
        if message is None:
            text = f"the job's process {outcome.died_how()}; /logs holds what it printed"
            return State.failed, {"code": "process_died", "message": text}
        if message["type"] == "error":
            return State.failed, {**message.get("more", {}), "code": message["code"], "message": message["message"]}
        return State.succeeded, None

    def _give_back(self, reason: str, *, spent: bool, outcome: Outcome | None = None) -> None:
        def back(conn: Connection) -> State | None:
            self._write_last_words(conn)
            return leases.give_back(
                conn,
                self.claim.holder,
                reason,
                spent=spent,
                max_attempts=self.station.settings.max_attempts,
                receipt=None if outcome is None else receipt_of(outcome),
            )

        state = self._persist(back)
        self.is_finished = True
        self.log.warning("gave the job back", reason=reason, state=state and state.value)

    def _give_up(self, reason: str, *, spent: bool) -> None:
        """`_give_back` after an error, which may be the database's own: then the keeper gives the job back later."""
        try:
            self._give_back(reason, spent=spent)
        except Exception:
            self.log.exception("nor could it be given back yet")

    def _take_progress(self, document: dict[str, Any]) -> None:
        self._progress = document

    def _flush_sometimes(self) -> None:
        now_s = time.monotonic()
        if now_s - self._flushed_s < FLUSH_S or not (self._progress or self._output.has_pending):
            return
        self._flushed_s = now_s
        document, chunks = self._progress, self._output.pending()
        try:
            with self.station.store.write() as conn:
                if leases.progress(conn, self.claim.holder, document):
                    logs.append(conn, self.claim.holder.job_id, self.claim.holder.attempt, chunks)
        except SQLAlchemyError as error:
            self.log.warning("progress could not be written yet", error=str(error).splitlines()[0])
            return
        self._progress = None
        self._output.stored(chunks)

    def _write_last_words(self, conn: Connection) -> None:
        """What was not written yet, in the same transaction as the end of the attempt."""
        holder = self.claim.holder
        if leases.progress(conn, holder, self._progress):
            logs.append(conn, holder.job_id, holder.attempt, self._output.pending())

    def _persist(self, write: Callable[[Connection], T]) -> T | None:
        """Run `write` in a transaction, again and again while the database is away; None if the worker closes first."""
        pause_s = 0.1
        while True:
            try:
                with self.station.store.write() as conn:
                    return write(conn)
            except SQLAlchemyError as error:
                if not is_transient(error):
                    raise
                self.log.warning("the record could not be made; trying on", error=str(error).splitlines()[0])
                if self.station.closing.is_set():
                    return None
                self.station.closing.wait(pause_s)
                pause_s = min(2 * pause_s, 2.0)
