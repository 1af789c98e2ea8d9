"""The job's own process: spec in, result out.

It leads a session of its own, holds only its devices and their cores, prints into the job's log, and talks to the
worker through a private pipe (workloads print; results never travel by stdout). Whatever happens to the worker, this
process and all it started die with it: a thread waits for the worker's end, and the kernel kills on the forkserver's.

Messages to the worker, as JSON: {"type": "progress", ...}; {"type": "checkpoint", "parts": [{"name", "path"}]}, which
it answers with {"stored": true or false}; then one of
{"type": "result", "result": text, "files": [...]} or {"type": "error", "code", "message", "files": [...]}, where an
error may bring "result" (what was measured until then) and "more" (further fields of `job.error`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson

from torchstone.ceilings import Ceilings
from torchstone.errors import DataMissing, JobError, OutOfMemory, WorkloadError
from torchstone.results import Result
from torchstone.specs import parse_spec
from worker import alive, processes
from worker.bench import Assignment, Bench, Event
from worker.workloads import workload

_VIRTUAL_HEADROOM_BYTES = 8 << 30
"""Address space is not memory: torch maps libraries and arenas that it never touches."""
STORE_WITHIN_S = 60.0
"""How long a job waits until a checkpoint is stored; it is stored later then, and the job goes on meanwhile."""


def main(
    assignment: Assignment,
    events: Connection,
    output: Connection,
    find: Callable[[str], Callable[[Any, Bench], Result]] = workload,
) -> None:
    """Run the job and send its result; the exit code says nothing that the message does not.

    `find` gives the `run` function of a kind.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the forkserver's own handling is not the job's
    os.setsid()
    processes.die_with_parent()
    processes.become_subreaper()
    # What this process starts is to be below it, not a sibling out of the worker's own forkserver.
    multiprocessing.forkserver._forkserver = multiprocessing.forkserver.ForkServer()
    _die_with_worker(assignment)
    _print_into(output)
    _confine(assignment)
    bench = Bench(
        job_id=assignment.job_id,
        attempt=assignment.attempt,
        host=assignment.host,
        devices=list(assignment.devices),
        folder=Path(assignment.folder),
        send=lambda event: events.send_bytes(orjson.dumps(event)),
        data_folders=assignment.data_folders,
        memory_limit_bytes=assignment.memory_limit_bytes,
        service_url=assignment.service_url,
        ceilings=Ceilings(assignment.ceilings),
        spare_cores=assignment.spare_cores,
        saved={name: Path(file) for name, file in assignment.saved},
        saved_fault=assignment.saved_fault,
        checkpoint_s=assignment.checkpoint_s,
        store=_Storing(events),
    )
    message: dict[str, Any]
    try:
        spec = parse_spec(orjson.loads(assignment.spec), diagnostics=True)  # whoever accepted it allowed it
        result = find(spec.kind)(spec, bench)
        message = {"type": "result", "result": result.to_json(), "files": bench.kept}
    except BaseException as error:
        cause = as_job_error(error)
        if isinstance(error, DataMissing):  # nobody's code is wrong: what is missing is all there is to say
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        message = {"type": "error", "code": cause.code, "message": str(cause), "more": cause.more, "files": bench.kept}
        if cause.partial is not None:
            message["result"] = cause.partial
    sys.stdout.flush()
    sys.stderr.flush()
    events.send_bytes(orjson.dumps(message))
    events.close()


class _Storing:
    """Sends an event that the worker answers, and waits for the answer: a while, then the job goes on without it."""

    def __init__(self, events: Connection) -> None:
        self._events = events
        self._unanswered = 0

    def __call__(self, event: Event) -> bool:
        while self._unanswered and self._events.poll(0):
            self._take()
        if self._unanswered:
            return False  # the worker is still at the last one
        self._events.send_bytes(orjson.dumps(event))
        self._unanswered += 1
        return self._events.poll(STORE_WITHIN_S) and self._take()

    def _take(self) -> bool:
        self._unanswered -= 1
        stored: bool = orjson.loads(self._events.recv_bytes())["stored"]
        return stored


def as_job_error(error: BaseException) -> JobError:
    """The error that ends the job, for whatever the workload raised."""
    if isinstance(error, JobError):
        return error
    text = f"{type(error).__name__}: {error}".strip()
    lowered = text.lower()
    if isinstance(error, MemoryError) or "out of memory" in lowered or "can't allocate memory" in lowered:
        return OutOfMemory(f"the job asked for more memory than it may take: {text[:2000]}")
    return WorkloadError(text[:4000])


def _die_with_worker(assignment: Assignment) -> None:
    """End this process's whole group as soon as the worker's process ends, or has long given no sign of life.

    A worker that was stopped (SIGSTOP) loses its lease, and the job may start elsewhere: it must not run twice.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        while not multiprocessing.connection.wait([parent.sentinel], alive.look_every_s(assignment.silence_s)):
            if alive.is_silent(assignment):
                alive.end_itself(Path(assignment.folder))
                break
        for pid in processes.descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="worker-watch", daemon=True).start()


def _print_into(output: Connection) -> None:
    """Everything printed from here on, by C code too, goes to the job's log; nothing is read from stdin."""
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _confine(assignment: Assignment) -> None:
    """Only the leased devices, their cores, the job's folder and its share of memory; torch follows all of it."""
    os.chdir(assignment.folder)
    os.environ.update(TMPDIR=assignment.folder, TORCHSTONE_JOB_ID=assignment.job_id)
    uuids = [device.uuid for device in assignment.devices if device.type == "cuda" and device.uuid]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    cores = {core for device in assignment.devices for core in device.cores}
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))  # for what the job starts afresh; torch is told by the workload
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not uuids:  # CUDA reserves address space far beyond its memory
        limit = assignment.memory_limit_bytes + _VIRTUAL_HEADROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(OSError):
        # Should the kernel run out of memory all the same, it is the job that goes, not the database.
        Path("/proc/self/oom_score_adj").write_text("1000")
