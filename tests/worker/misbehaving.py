"""Jobs that do what jobs should not, for the tests of the worker: the job's `name` says which.

launcher = Launcher(entry="tests.worker.misbehaving")      # the real child, with these in place of the experiments
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torchstone.results import Figure, Result
from worker import child
from worker.bench import Assignment, Bench

FOREVER_S = 600


def main(assignment: Assignment, events: Connection, output: Connection) -> None:
    child.main(assignment, events, output, find=lambda kind: run)


def run(spec: Any, bench: Bench) -> Result:
    assert spec.name is not None
    name, _, argument = spec.name.partition(" ")
    print(f"this is {name}", flush=True)
    result: Result = globals()[f"do_{name}"](bench, argument)
    return result


def do_answer(bench: Bench, argument: str) -> Result:
    """Behaves: a figure, a file, progress, and the facts that the process was given."""
    bench.file("words.txt").write_text(argument or "words")
    bench.keep(bench.file("words.txt"), "text/plain")
    bench.progress(1, 1, "steps")
    facts = {
        "cores": sorted(os.sched_getaffinity(0)),
        "session": os.getsid(0) == os.getpid(),
        "secrets": [name for name in os.environ if name.startswith("TORCHSTONE_") and name != "TORCHSTONE_JOB_ID"],
        "cuda": os.environ["CUDA_VISIBLE_DEVICES"],
        "folder": Path.cwd() == bench.folder,
    }
    nan = Figure(name="nan", of="answer", value=float("nan"), unit="1")
    return Result(figures=[nan], environment={"hosts": [facts]})


def do_wait(bench: Bench, argument: str) -> Result:
    """Goes on until it is ended."""
    bench.progress(1, 2, "steps")
    while True:
        time.sleep(FOREVER_S)


def do_save(bench: Bench, argument: str) -> Result:
    """Saves its attempt's number and goes on until it is ended; a later attempt answers with what it finds."""
    if bench.saved:
        found = {name: path.read_text() for name, path in bench.saved.items()}
        return Result(environment={"hosts": [{"found": found}]})
    for number in (1, 2):
        (bench.folder / "part").write_text(f"attempt {bench.attempt}, save {number}")
        print("stored", bench.save({"part": bench.folder / "part"}), flush=True)
    return do_wait(bench, argument)


def do_wait_for(bench: Bench, argument: str) -> Result:
    """Goes on until a file exists."""
    while not Path(argument).exists():
        time.sleep(0.01)
    return Result()


def do_deaf(bench: Bench, argument: str) -> Result:
    """Takes no SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return do_breed(bench, argument)


def do_breed(bench: Bench, argument: str) -> Result:
    """Leaves children in sessions of their own, one of them orphaned, and goes on."""
    _breed()
    return do_wait(bench, argument)


def do_breed_and_end(bench: Bench, argument: str) -> Result:
    """Leaves such children behind and ends well."""
    _breed()
    return Result()


def _breed() -> None:
    sleeper = [sys.executable, "-S", "-c", f"import time; time.sleep({FOREVER_S})"]
    deaf = [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"]
    children = [subprocess.Popen(sleeper), subprocess.Popen(deaf, start_new_session=True)]
    orphan = subprocess.run(
        [sys.executable, "-S", "-c", f"import subprocess; print(subprocess.Popen({sleeper!r}, stdout=2).pid)"],
        start_new_session=True,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    print("pids", *(child.pid for child in children), orphan.stdout.strip(), flush=True)


def do_segfault(bench: Bench, argument: str) -> Result:
    ctypes.string_at(0)
    return Result()


def do_exit(bench: Bench, argument: str) -> Result:
    os._exit(int(argument))


def do_kill(bench: Bench, argument: str) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)
    return Result()


def do_raise(bench: Bench, argument: str) -> Result:
    raise ZeroDivisionError("the experiment's own mistake")


def do_shout(bench: Bench, argument: str) -> Result:
    """Prints as many MB as it is told, some of it not UTF-8."""
    os.write(1, b"\xff\xfe not text \x00\n")
    for _ in range(int(argument)):
        os.write(1, b"x" * 999_999 + b"\n")
    return Result()


def do_eat(bench: Bench, argument: str) -> Result:
    """Takes memory until somebody minds."""
    eaten = []
    while True:
        eaten.append(bytearray(os.urandom(1) * (16 << 20)))


def do_lie_and_raise(bench: Bench, argument: str) -> Result:
    """Keeps a file that is not there, and fails."""
    do_lie(bench, argument)
    raise ZeroDivisionError("the experiment's own mistake")


def do_lie(bench: Bench, argument: str) -> Result:
    """Names a file that it never made."""
    bench.keep(bench.file("never.bin"), "application/octet-stream")
    return Result()


def do_stutter(bench: Bench, argument: str) -> Result:
    """Is stopped half-way through a message."""
    bench.progress(1, 2, "steps")
    os.write(_events_of(bench), struct.pack("!i", 1000) + b'{"type": "progress"')
    return do_wait(bench, argument)


def do_gibberish(bench: Bench, argument: str) -> Result:
    """Sends what is no message, and goes on."""
    os.write(_events_of(bench), b"\x7f\xff\xff\xff no message of ours")
    return Result()


def _events_of(bench: Bench) -> int:
    """The pipe behind `bench.send`."""
    events: Connection = inspect.getclosurevars(bench.send).nonlocals["events"]
    return events.fileno()


def do_answer_and_stay(bench: Bench, argument: str) -> Result:
    """Answers, and then does not go: a thread of its own holds the process."""
    threading.Thread(target=time.sleep, args=(FOREVER_S,)).start()
    return Result()


def do_leave_a_shouter(bench: Bench, argument: str) -> Result:
    """Leaves an orphan that prints for ever, and ends at once."""
    shouter = "import os\nwhile True: os.write(1, b'x' * 65536)"
    starter = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {shouter!r}])"
    subprocess.run([sys.executable, "-S", "-c", starter], start_new_session=True, check=True)
    return Result()
