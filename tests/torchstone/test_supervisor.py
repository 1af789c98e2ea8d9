"""The supervisor, with small real programs as parts. It runs in a process of its own, as in life."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.torchstone.processes import Mark, marked, wait_until

# A part that writes its pid, starts a grandchild in its own group and one in a session of its own, and waits.
FAMILY = """
import os, signal, subprocess, sys, time
STUBBORN and signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
print("NAME is up", flush=True)
open("NAME.pid", "w").write(str(os.getpid()))
time.sleep(600)
"""


def family(name: str, stubborn: bool = False) -> str:
    return FAMILY.replace("NAME", name).replace("STUBBORN", str(stubborn))


def program(parts: str) -> list[str]:
    code = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from torchstone.errors import SetupError
        from torchstone.supervisor import Part, Supervisor
        def python(code): return [sys.executable, "-c", code]
        def wrote(name): return lambda: Path(name + ".pid").exists()
        supervisor = Supervisor(PARTS)
        try:
            sys.exit(supervisor.run(on_ready=lambda: supervisor.say("all ready")))
        except SetupError as error:
            print(error)
            sys.exit(1)
        """
    )
    return [sys.executable, "-c", code.replace("PARTS", parts)]


def start(folder: Path, mark: Mark, parts: str) -> subprocess.Popen[bytes]:
    with (folder / "out.txt").open("wb") as out:
        return subprocess.Popen(
            program(parts),
            cwd=folder,
            env=mark.environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # whoever runs the tests may ignore it
        )


def output(folder: Path) -> str:
    return (folder / "out.txt").read_text()


def wait_for_output(folder: Path, pattern: str, within_s: float = 20) -> None:
    wait_until(lambda: re.search(pattern, output(folder)), within_s, lambda: f"no {pattern!r} in:\n{output(folder)}")


def pid_of(folder: Path, name: str) -> int:
    path = folder / f"{name}.pid"
    wait_until(lambda: path.exists() and path.read_text(), within_s=20)
    return int(path.read_text())


TWO = f"[Part('a', python({family('a')!r}), ready=wrote('a')), Part('b', python({family('b')!r}), ready=wrote('b'))]"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_in_seconds_with_nothing_left(tmp_path: Path, number: signal.Signals) -> None:
    with marked() as mark:
        process = start(tmp_path, mark, TWO)
        wait_for_output(tmp_path, "all ready")
        assert len(mark.processes()) == 7  # the supervisor, two parts, four grandchildren
        process.send_signal(number)
        assert process.wait(10) == 0
        assert mark.processes() == []
    lines = output(tmp_path).splitlines()
    # Each part's lines come through a pipe of its own: in which order, among the parts', nobody promises.
    assert sorted(lines[:3]) == ["a          | a is up", "b          | b is up", "torchstone | all ready"]
    assert lines[3:] == [f"torchstone | stopping ({number.name})"]


def test_parts_stop_in_reverse_order(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; from pathlib import Path\n"
        "def stop(*_): print('NAME stops', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop); Path('NAME.pid').touch(); time.sleep(600)"
    )
    parts = ", ".join(f"Part({n!r}, python({code.replace('NAME', n)!r}), ready=wrote({n!r}))" for n in "abc")
    with marked() as mark:
        process = start(tmp_path, mark, f"[{parts}]")
        wait_for_output(tmp_path, "all ready")
        process.terminate()
        assert process.wait(10) == 0
    assert re.findall(r"(\w) stops", output(tmp_path)) == ["c", "b", "a"]


def test_a_part_that_ignores_term_is_killed_after_its_grace(tmp_path: Path) -> None:
    with marked() as mark:
        process = start(
            tmp_path, mark, f"[Part('a', python({family('a', stubborn=True)!r}), ready=wrote('a'), grace_s=0.5)]"
        )
        wait_for_output(tmp_path, "all ready")
        begin_s = time.monotonic()
        process.terminate()
        assert process.wait(10) == 0
        assert 0.4 < time.monotonic() - begin_s < 5
        assert mark.processes() == []
    assert "a did not stop within 0.5 s and was killed" in output(tmp_path)


def test_a_part_that_is_suspended_stops_in_order_too(tmp_path: Path) -> None:
    """And so does one that waits for it: a worker says goodbye to its broker."""
    with marked() as mark:
        process = start(tmp_path, mark, f"[Part('a', python({family('a')!r}), ready=wrote('a'), grace_s=60)]")
        wait_for_output(tmp_path, "all ready")
        os.kill(pid_of(tmp_path, "a"), signal.SIGSTOP)
        process.terminate()
        assert process.wait(20) == 0
    assert "was killed" not in output(tmp_path)


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    with marked() as mark:
        process = start(
            tmp_path, mark, f"[Part('a', python({family('a', stubborn=True)!r}), ready=wrote('a'), grace_s=60)]"
        )
        wait_for_output(tmp_path, "all ready")
        process.send_signal(signal.SIGINT)
        wait_for_output(tmp_path, "stopping")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert mark.processes() == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent-death signal")
def test_parts_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    code = "import time; open('a.pid', 'w').write('0'); time.sleep(600)"
    with marked() as mark:
        process = start(tmp_path, mark, f"[Part('a', python({code!r}), ready=wrote('a'))]")
        wait_for_output(tmp_path, "all ready")
        process.kill()
        process.wait(10)
        mark.wait_until_gone(within_s=2)


def test_a_crashed_part_is_restarted_and_says_so(tmp_path: Path) -> None:
    with marked() as mark:
        process = start(tmp_path, mark, TWO)
        wait_for_output(tmp_path, "all ready")
        first = pid_of(tmp_path, "b")
        (tmp_path / "b.pid").unlink()
        os.kill(first, signal.SIGKILL)
        wait_for_output(tmp_path, r"b was killed by SIGKILL; restart 1 in 0.5 s")
        wait_for_output(tmp_path, r"b is ready again \(restart 1\)")
        assert pid_of(tmp_path, "b") != first
        assert len(mark.processes()) == 7  # the first b's grandchildren are gone, too
        process.terminate()
        assert process.wait(10) == 0
        assert mark.processes() == []


def test_the_backoff_grows_and_the_exit_code_is_told(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "if Path('a.pid').exists(): sys.exit(3)\n"
        "Path('a.pid').touch(); time.sleep(0.3); sys.exit(7)"
    )
    with marked() as mark:
        process = start(tmp_path, mark, f"[Part('a', python({code!r}), ready=wrote('a'))]")
        wait_for_output(tmp_path, "a exited with code 7; restart 1 in 0.5 s")
        wait_for_output(tmp_path, "a exited with code 3; restart 2 in 1 s")
        wait_for_output(tmp_path, "a exited with code 3; restart 3 in 2 s")
        process.terminate()
        assert process.wait(10) == 0


def test_a_part_that_ends_before_it_is_ready_stops_the_rest(tmp_path: Path) -> None:
    parts = f"[Part('a', python({family('a')!r}), ready=wrote('a')), Part('b', python('print(1/0)'), ready=wrote('b'))]"
    with marked() as mark:
        process = start(tmp_path, mark, parts)
        assert process.wait(20) == 1
        assert mark.processes() == []
    assert "b          | ZeroDivisionError" in output(tmp_path)
    assert "b exited with code 1 before everything was ready" in output(tmp_path)


def test_a_part_that_is_never_ready_meets_its_deadline(tmp_path: Path) -> None:
    with marked() as mark:
        process = start(
            tmp_path, mark, "[Part('a', python('import time; time.sleep(600)'), ready=wrote('a'), ready_within_s=0.5)]"
        )
        assert process.wait(20) == 1
        assert mark.processes() == []
    assert "a was not ready within 0.5 s" in output(tmp_path)


def test_a_signal_during_the_start_stops_it(tmp_path: Path) -> None:
    with marked() as mark:
        process = start(tmp_path, mark, f"[Part('a', python({family('a')!r}), ready=wrote('never'))]")
        pid_of(tmp_path, "a")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert mark.processes() == []
    assert "all ready" not in output(tmp_path)


def test_a_reader_that_went_away_is_no_reason_to_stop(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "for i in range(10**9):\n"
        "    print('tick' * 100, flush=True)\n"
        "    if Path('gone').exists(): Path('after').write_text(str(i)); break\n"
        "for j in range(10000): print('tock' * 100, flush=True)\n"
        "Path('a.pid').touch()\n"
        "import time; time.sleep(600)"
    )
    with marked() as mark:
        process = subprocess.Popen(
            program(f"[Part('a', python({code!r}), ready=wrote('a'))]"),
            cwd=tmp_path,
            env=mark.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        assert b"tick" in process.stdout.read(1000)
        process.stdout.close()
        (tmp_path / "gone").touch()
        wait_until((tmp_path / "a.pid").exists, within_s=20)  # it went on printing, and was not held up
        assert process.poll() is None
        process.terminate()
        assert process.wait(10) == 0
        assert mark.processes() == []
