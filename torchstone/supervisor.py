"""Run parts of Torchstone as child processes: start them in order, restart what crashes, leave nothing behind.

    Supervisor([
        Part("broker", broker_argv, ready=lambda: broker.answers(settings)),
        Part("api", [sys.executable, "-m", "service"], ready=api_is_ready),
    ]).run()                                   # returns an exit code once everything has stopped

Every part is the leader of a session of its own. SIGINT, SIGTERM or SIGHUP stop the parts in reverse order: TERM, a
grace, then KILL for the part's whole process group; a second signal kills at once. On Linux the kernel kills the parts
when this process itself is killed (PR_SET_PDEATHSIG), and orphans of a part are handed to this process
(PR_SET_CHILD_SUBREAPER), which kills them. Elsewhere those two do not exist and a SIGKILL of this process leaves the
parts running.

It is one thread and one loop, because PR_SET_PDEATHSIG follows the thread that forked, and because forking is only
safe from a process with one thread. `run` must be called from the main thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchstone.errors import SetupError
from torchstone.relay import Relay
from torchstone.tether import adopt_orphans, die_with_parent, kill_group, kill_orphans, reap_orphans

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OWN_NAME = "torchstone"
_TICK_S = 0.05
_BACKOFF_FIRST_S = 0.5
_BACKOFF_MOST_S = 30.0
_HEALTHY_AFTER_S = 60.0


def always_ready() -> bool:
    """For a part that needs no probe: it is ready once it runs."""
    return True


@dataclass(frozen=True)
class Part:
    """One program to keep running."""

    name: str
    argv: Sequence[str] | Callable[[], Sequence[str]]
    """What to run; a callable is asked before every start (to clear what a crash left over)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own environment."""
    ready: Callable[[], bool] = always_ready
    """Asked again and again after a start until it says yes; it must answer within about a second."""
    ready_within_s: float = 30.0
    grace_s: float = 5.0
    """Between TERM and KILL when it is stopped."""
    hush: tuple[str, ...] = ()
    """Output lines that hold one of these are not shown."""


@dataclass
class _Running:
    part: Part
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    is_ready: bool = False
    restarts: int = 0
    backoff_s: float = _BACKOFF_FIRST_S
    restart_at_s: float | None = None


class Supervisor:
    """Keeps `parts` running until it is told to stop."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._running = [_Running(part) for part in parts]
        self._relay = Relay([_OWN_NAME, *(part.name for part in parts)])
        self._signals: list[int] = []
        self._selector = selectors.DefaultSelector()

    def run(self, on_ready: Callable[[], None] | None = None) -> int:
        """Start every part, wait for it, call `on_ready`, then keep all running until a stop signal.

        Returns 0 after a stop signal. Raises SetupError where a part does not become ready at its first start; by
        then everything has been stopped.
        """
        adopt_orphans()
        with self._listening_for_signals():
            try:
                for running in self._running:
                    self._start(running)
                    self._wait_until_ready(running)
                    if self._signals:
                        return 0
                if on_ready is not None:
                    on_ready()
                while not self._signals:
                    self._turn(_TICK_S if self._is_busy() else 1.0)
                    self._mend()
                return 0
            finally:
                self._stop_all()

    def say(self, line: str) -> None:
        """Print a line of our own among those of the parts."""
        self._relay.feed(_OWN_NAME, line.encode() + b"\n")

    # -- starting -----------------------------------------------------------------------------------------------

    def _start(self, running: _Running) -> None:
        part = running.part
        argv = part.argv() if callable(part.argv) else part.argv
        try:
            process = subprocess.Popen(
                list(argv),
                env={**os.environ, **part.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise SetupError(f"{part.name} cannot be started: {error}") from error
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, running)
        running.process = process
        running.started_s = time.monotonic()
        running.is_ready = False
        running.restart_at_s = None

    def _wait_until_ready(self, running: _Running) -> None:
        """Until the part is ready, or a stop signal came; raises SetupError at its end or its deadline."""
        part = running.part
        deadline_s = running.started_s + part.ready_within_s
        while not self._signals:
            self._turn(_TICK_S)
            for other in self._running:
                how = self._end_of(other)
                if how is not None:
                    raise SetupError(f"{other.part.name} {how} before everything was ready; its output is above")
            if part.ready():
                running.is_ready = True
                return
            if time.monotonic() > deadline_s:
                raise SetupError(f"{part.name} was not ready within {part.ready_within_s:g} s; its output is above")

    # -- running ------------------------------------------------------------------------------------------------

    def _turn(self, timeout_s: float) -> None:
        """Pass on what parts print, or wait that long for it; ends early when a signal or a child's end arrives."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
            else:
                self._pass_on(key.data)
        reap_orphans(self._pids())

    def _pass_on(self, running: _Running) -> bool:
        """Show a piece of what a part printed; False where there is nothing more for now."""
        process = running.process
        if process is None or process.stdout is None or process.stdout.closed:
            return False
        try:
            piece = os.read(process.stdout.fileno(), 65536)
        except BlockingIOError:
            return False
        if piece:
            self._relay.feed(running.part.name, piece, running.part.hush)
            return True
        self._selector.unregister(process.stdout)
        process.stdout.close()
        return False

    def _is_busy(self) -> bool:
        return any(not r.is_ready or r.restart_at_s is not None for r in self._running)

    def _mend(self) -> None:
        """Notice crashed parts, start those again whose back-off is over, and watch those that are starting."""
        now_s = time.monotonic()
        for running in self._running:
            how = self._end_of(running)
            if how is not None:
                self._plan_restart(running, how, now_s)
            elif running.process is None and running.restart_at_s is not None and now_s >= running.restart_at_s:
                self._restart(running, now_s)
            elif running.process is not None and not running.is_ready:
                self._watch_start(running, running.process, now_s)

    def _plan_restart(self, running: _Running, how: str, now_s: float) -> None:
        if running.is_ready and now_s - running.started_s > _HEALTHY_AFTER_S:
            running.backoff_s = _BACKOFF_FIRST_S
        running.restarts += 1
        running.restart_at_s = now_s + running.backoff_s
        self.say(f"{running.part.name} {how}; restart {running.restarts} in {running.backoff_s:g} s")
        running.backoff_s = min(running.backoff_s * 2, _BACKOFF_MOST_S)

    def _restart(self, running: _Running, now_s: float) -> None:
        try:
            self._start(running)
        except SetupError as error:
            self._plan_restart(running, f"could not be restarted ({error})", now_s)

    def _watch_start(self, running: _Running, process: subprocess.Popen[bytes], now_s: float) -> None:
        if running.part.ready():
            running.is_ready = True
            self.say(f"{running.part.name} is ready again (restart {running.restarts})")
        elif now_s - running.started_s > running.part.ready_within_s:
            self.say(f"{running.part.name} was not ready within {running.part.ready_within_s:g} s and is killed")
            kill_group(process.pid)

    def _end_of(self, running: _Running) -> str | None:
        """How the part ended, in words, once; None while it runs or is known to be down."""
        process = running.process
        if process is None or process.poll() is None:
            return None
        kill_group(process.pid)
        self._close(running)
        kill_orphans(self._pids())
        return _how_it_ended(process.returncode)

    def _close(self, running: _Running) -> None:
        """Show the last of what a dead part printed, and forget the process."""
        while self._pass_on(running):
            pass
        process = running.process
        if process is not None and process.stdout is not None and not process.stdout.closed:
            self._selector.unregister(process.stdout)
            process.stdout.close()
        self._relay.flush(running.part.name)
        running.process = None

    def _pids(self) -> set[int]:
        return {running.process.pid for running in self._running if running.process is not None}

    # -- stopping -----------------------------------------------------------------------------------------------

    def _stop_all(self) -> None:
        heard = len(self._signals)
        if heard:
            self.say(f"stopping ({signal.Signals(self._signals[0]).name})")
        for running in self._running:
            if running.process is not None:  # one that is suspended hears no TERM, and the others may wait for it
                kill_group(running.process.pid, signal.SIGCONT)
        for running in reversed(self._running):
            self._stop(running, heard)
        kill_orphans(())

    def _stop(self, running: _Running, heard: int) -> None:
        process = running.process
        if process is None:
            return
        kill_group(process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + running.part.grace_s
        while process.poll() is None:
            if time.monotonic() > deadline_s:
                self.say(f"{running.part.name} did not stop within {running.part.grace_s:g} s and was killed")
                break
            if len(self._signals) > heard:
                break
            self._turn(_TICK_S)
        kill_group(process.pid)
        process.wait()
        self._close(running)
        kill_orphans(self._pids())

    @contextlib.contextmanager
    def _listening_for_signals(self) -> Iterator[None]:
        """Stop signals are noted instead of raised; they and a child's end wake the loop through a pipe."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        old_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        heeded = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]  # nohup
        old = {number: signal.signal(number, lambda n, _: self._signals.append(n)) for number in heeded}
        old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda _n, _f: None)
        self._selector.register(reader, selectors.EVENT_READ, None)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_fd)
            self._selector.close()
            os.close(reader)
            os.close(writer)


def _how_it_ended(returncode: int) -> str:
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return f"was killed by {name}"
    return f"exited with code {returncode}"
