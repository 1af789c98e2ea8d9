"""The worker of one host: registers it, claims jobs, runs each in a process of its own, keeps the leases alive.

    host = WorkerHost(settings)
    host.open()                    # registers, takes back what an earlier run left, starts the keeper thread
    host.look()                    # claim and start whatever is due; a doorbell calls this, and so does the keeper
    host.drain(); host.close()

Three kinds of thread: whoever calls `look`, one runner a job (`worker.run`), and the keeper, which twice a second asks
the database which of its jobs were cancelled or taken away, renews the leases, and looks for work by itself. A worker
that cannot renew its leases for `fence_s` ends its own jobs: by then somebody else may have them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import orjson
import psutil
import structlog
from sqlalchemy.exc import SQLAlchemyError

import torchstone
from torchstone.errors import SetupError
from torchstone.jobs import State
from torchstone.settings import Settings
from torchstone.store import Store, claims, hosts, leases
from torchstone.store.artifacts import Blobs
from worker.alive import Alive
from worker.checkpoints import release
from worker.devices import discover, machine_id, memory_limit_bytes
from worker.launch import Launcher, end_recorded
from worker.run import DATABASE_AWAY, JobRun, Station

KEEP_S = 0.5
"""How soon a cancellation is seen."""

DATABASE_PATIENCE_S = 5.0
"""A locked database is asked again sooner than leases run out."""

# What a stopping worker spends, of `settings.stopped_within_s`, on storing what its jobs made, and on each later step.
_RECORD_S = 4.0
_HAND_BACK_S = 1.5

_JOB_FOLDER = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}-\d+")

log = structlog.get_logger(__name__)


class WorkerHost:
    """This host, as the database knows it, and the jobs that it runs now."""

    def __init__(self, settings: Settings, launcher: Launcher | None = None) -> None:
        self.settings = settings
        self.store = Store(settings.database_url, busy_timeout_s=DATABASE_PATIENCE_S)
        self.blobs = Blobs(settings.artifacts_url)
        self.launcher = launcher or Launcher()
        self.devices = {device.name: device for device in discover(settings)}
        self.host = hosts.Host(
            name=settings.host_name,
            machine=machine_id(settings),
            incarnation=uuid.uuid4().hex,
            pid=os.getpid(),
            pid_started=psutil.Process().create_time(),
            devices=[device.document() for device in self.devices.values()],
            memory_bytes=memory_limit_bytes(settings),
            info={"torchstone": torchstone.__version__},
        )
        assert settings.work is not None
        self.work: Path = settings.work / settings.host_name
        self.on_free_change: Callable[[int, int], None] = lambda cuda, cpu: None
        """Told how many devices of each type are free: whenever that changed, and twice a second in any case."""
        self._runs: dict[tuple[str, int], JobRun] = {}
        self._fenced: set[tuple[str, int]] = set()
        """Jobs that were ended only because the database was out of reach: they are not to pay for that."""
        self._alive = Alive(self.work / "alive")
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._station = Station(
            settings,
            self.store,
            self.blobs,
            self.launcher,
            self.devices,
            self.host,
            self.work,
            self._stopping,
            self._alive.path,
            self._is_overdue,
        )
        self._draining = False
        self._renewed_s = time.monotonic()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._releaser = threading.Thread(target=self._release_now_and_then, name="releaser", daemon=True)
        self._turn: IO[str] | None = None

    def open(self) -> None:
        """Become known and start looking for work. Raises SetupError when another living worker has this name."""
        self.work.mkdir(parents=True, exist_ok=True)
        self._turn = _only_one(self.work / "worker.lock", self.settings.host_name)
        self._clear_work()
        self.launcher.warm_up()  # before anybody counts on this host
        for holder in self._register():
            log.warning("took back a job from this host's earlier run", job_id=holder.job_id, attempt=holder.attempt)
        self._renewed(time.monotonic())
        self._keeper.start()
        self._releaser.start()
        log.info("registered", host=self.host.name, devices=list(self.devices), memory_bytes=self.host.memory_bytes)

    def _register(self) -> list[leases.Holder]:
        """Become known, once no living worker has this name or a device of this one; what an earlier run held is lost.

        A worker that is silent may be dead, its container replaced by this one: it has until its lease ends to be heard
        of. Raises SetupError.
        """
        waited_for: dict[str, int] = {}
        waiting = False
        while True:
            with self.store.write() as conn:
                hosts.lock_machine(conn, self.host.machine)
                self._refuse_a_namesake(hosts.find(conn, self.host.name))
                found = hosts.beside(conn, self.host.machine, self.host.name, self.settings.lease_s)
                rivals = {other["name"]: fault for other in found if (fault := self._in_the_way(other))}
                if not rivals:
                    hosts.register(conn, self.host)
                    return leases.take_back_from(
                        conn,
                        self.host.name,
                        self.host.incarnation,
                        "its worker was restarted",
                        max_attempts=self.settings.max_attempts,
                    )
            for other in found:
                first_seen_us = waited_for.setdefault(other["name"], other["seen_us"])
                if other["name"] in rivals and (_lives(other) or other["seen_us"] != first_seen_us):
                    raise SetupError(rivals[other["name"]])
            if not waiting:
                log.warning("waiting for the lease of a silent worker to end", why=list(rivals.values()))
            waiting = True
            time.sleep(1)

    def _refuse_a_namesake(self, other: dict[str, Any] | None) -> None:
        """Raise SetupError where another living worker, with another work folder or elsewhere, has this name."""
        if other is None or other["state"] == "down":
            return
        if other["machine"] == self.host.machine:
            if _lives(other) and other["pid"] != os.getpid():
                raise SetupError(f"a worker for host {self.host.name!r} is already running (pid {other['pid']})")
        elif other["silent_s"] < self.settings.lease_s:
            raise SetupError(
                f"host name {self.host.name!r} is in use by a living worker on another machine: "
                "set TORCHSTONE_HOST_NAME to a name of its own"
            )

    def _in_the_way(self, other: dict[str, Any]) -> str | None:
        """Why this worker cannot run beside another on its machine: one device of two owners, a gang could starve."""
        for theirs in orjson.loads(other["devices"]):
            for mine in self.devices.values():
                if mine.is_same_as(theirs):
                    return (
                        f"{theirs['name']} is owned by the worker {other['name']!r} on this machine: "
                        "give each worker devices of its own (TORCHSTONE_DEVICES)"
                    )
                if mine.name == theirs["name"]:
                    return (
                        f"{mine.name} is another device here than for the worker {other['name']!r} on this machine: "
                        "workers that see devices of their own, as containers do, need a TORCHSTONE_MACHINE each"
                    )
        return None

    def look(self) -> None:
        """Claim and start jobs until there is none for this host now."""
        with self._lock:
            while not self._draining and not self._stopping.is_set() and any(self.free()):
                with self.store.write() as conn:
                    claim = claims.claim(conn, self.host, self.settings.lease_s)
                if claim is None:
                    return
                run = JobRun(self._station, claim, self.ended)
                run.start()  # its end waits for the lock; if it cannot start, the keeper gives the job back
                for other in self._runs.values():
                    if not other.is_finished:
                        run.meet(other)
                self._runs[claim.holder.job_id, claim.holder.attempt] = run
                self.on_free_change(*self.free())

    def free(self) -> tuple[int, int]:
        """How many (cuda, cpu) devices are free here, as far as this process knows."""
        with self._lock:
            runs = list(self._runs.values())
            if any(run.claim.exclusive for run in runs):
                return 0, 0
            taken = {name for run in runs for name in run.claim.devices}
            free = [device.type for name, device in self.devices.items() if name not in taken]
            return free.count("cuda"), free.count("cpu")

    def ended(self, run: JobRun) -> None:
        """Called by a run when its devices are free again: the next job follows at once."""
        with self._lock:
            self._runs.pop((run.claim.holder.job_id, run.claim.holder.attempt), None)
        self.on_free_change(*self.free())
        if not self._draining and not self._stopping.is_set():
            with contextlib.suppress(SQLAlchemyError):  # the keeper looks again soon, and tells
                self.look()

    def drain(self) -> None:
        """Take no more jobs, let the running ones go on for `drain_s`, then hand them back unspent."""
        self._draining = True
        with contextlib.suppress(SQLAlchemyError), self.store.write() as conn:
            hosts.set_state(conn, self.host.name, self.host.incarnation, "draining")
        self._join(self.settings.drain_s)
        for run in self.runs():
            run.stop("draining")
        self._join(self.settings.kill_grace_s + _RECORD_S)
        self._stopping.set()  # nobody waits for a bucket, a database or other bytes any more
        self._join(_HAND_BACK_S)
        for run in self.runs():
            run.hand_back()

    def close(self) -> None:
        """End what still runs, say goodbye, end the forkserver."""
        self.close_but_launcher()
        self.launcher.close()

    def close_but_launcher(self) -> None:
        """`close`, for a launcher that somebody else goes on using."""
        was_drained = self._stopping.is_set()
        self._draining = True
        self._stopping.set()
        for run in self.runs():
            run.stop("draining")
        self._join(_HAND_BACK_S if was_drained else self.settings.kill_grace_s + 15)
        for thread in (self._keeper, self._releaser):
            if thread.is_alive():
                thread.join(timeout=_HAND_BACK_S)
        with contextlib.suppress(SQLAlchemyError), self.store.write() as conn:
            hosts.set_state(conn, self.host.name, self.host.incarnation, "down")
        self.store.dispose()
        if self._turn is not None:
            self._turn.close()

    def _join(self, within_s: float) -> None:
        """Wait until no job runs here any more, at most so long."""
        deadline_s = time.monotonic() + within_s
        for run in self.runs():
            run.join(max(0.0, deadline_s - time.monotonic()))

    def runs(self) -> list[JobRun]:
        """The jobs that run here now."""
        with self._lock:
            return list(self._runs.values())

    def _keep(self) -> None:
        """The keeper: renew, obey, look; once each round, and never die of a database that is away."""
        renew_at = look_at = 0.0
        was_away = False
        while not self._stopping.wait(KEEP_S):
            now_s = time.monotonic()
            try:
                if now_s >= renew_at:
                    with self.store.write() as conn:
                        known = leases.renew(conn, self.host.name, self.host.incarnation, self.settings.lease_s)
                    if known:
                        self._renewed(now_s)
                        self._give_back_forgotten()
                    elif self.runs():
                        log.error("another worker took this host's name: this one's leases are no longer renewed")
                    renew_at = now_s + self.settings.heartbeat_s
                if self.runs():
                    self._obey()
                self.on_free_change(*self.free())
                if now_s >= look_at:
                    self.look()
                    look_at = now_s + self.settings.poll_s * (0.75 + 0.5 * (uuid.uuid4().int % 1000) / 1000)
                was_away = False
            except SQLAlchemyError as error:
                if not was_away:
                    log.warning("the database cannot be reached; trying on", error=str(error).splitlines()[0])
                was_away = True
            except Exception:
                log.exception("the keeper met an error; going on")
            self._fence()

    def _release_now_and_then(self) -> None:
        """In a thread of its own: no lease waits for a bucket that does not answer."""
        while not self._stopping.wait(self.settings.poll_s):
            try:
                release(self.store, self.blobs)
            except SQLAlchemyError:  # the keeper tells it
                pass
            except Exception:
                log.exception("checkpoints could not be deleted; trying on")

    def _renewed(self, now_s: float) -> None:
        """The leases run on from `now_s`: the jobs' own processes look for that, too."""
        self._renewed_s = now_s
        self._alive.say(now_s)

    def _obey(self) -> None:
        """End the jobs that were cancelled or that this worker no longer holds."""
        runs = self.runs()  # before the question: a job claimed after it would look like one that was taken away
        with self.store.read() as conn:
            held = leases.held(conn, self.host.name, self.host.incarnation)
        for run in runs:
            state = held.get((run.claim.holder.job_id, run.claim.holder.attempt))
            if state == State.canceling:
                run.stop("canceled")
            elif state is None and not run.is_finished:
                run.stop("fenced")

    def _give_back_forgotten(self) -> None:
        """Hand back what this worker holds and does not run: nobody else would while it goes on renewing the lease.

        That happens when a claim was made but the answer got lost, when a job was ended because its lease could not be
        renewed and then it could be after all, and when the record of an end could not be made.
        """
        with self._lock:  # no claim is under way, and a run that is gone from here has made its record, if it could
            with self.store.read() as conn:
                held = leases.held(conn, self.host.name, self.host.incarnation)
            for job_id, attempt in held.keys() - self._runs.keys():
                holder = leases.Holder(job_id, attempt, self.host.name, self.host.incarnation)
                fenced = (job_id, attempt) in self._fenced
                reason = DATABASE_AWAY if fenced else "its worker lost it"
                with self.store.write() as conn:
                    leases.give_back(conn, holder, reason, spent=not fenced, max_attempts=self.settings.max_attempts)
                log.warning("gave back a job that does not run here any more", job_id=job_id, attempt=attempt)
            self._fenced &= self._runs.keys()  # those may still be ending

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._renewed_s > self.settings.fence_s

    def _fence(self) -> None:
        if self._is_overdue():
            for run in self.runs():
                holder = run.claim.holder
                if (holder.job_id, holder.attempt) not in self._fenced:
                    run.log.error("ending the job: its lease could not be renewed")
                self._fenced.add((holder.job_id, holder.attempt))
                run.stop("fenced")

    def _clear_work(self) -> None:
        """End and remove what an earlier worker of this host left behind, and nothing that is not a job's folder."""
        for folder in self.work.iterdir():
            if not _JOB_FOLDER.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
                continue
            for pid in end_recorded(folder):
                log.warning("ended a process of an earlier worker", pid=pid, folder=folder.name)
            shutil.rmtree(folder, ignore_errors=True)


def _lives(other: dict[str, Any]) -> bool:
    """Whether the worker process of a host on this machine is seen to live; from within a container it may not be."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(other["pid"]).create_time() == other["pid_started"])
    return False


def _only_one(path: Path, name: str) -> IO[str]:
    """Hold `path` locked for this process's life. Raises SetupError when another worker does."""
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise SetupError(f"a worker for host {name!r} is already running here (pid {holder})") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
