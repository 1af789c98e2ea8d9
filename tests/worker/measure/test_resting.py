"""Helper threads that go on running after an operation are waited for, and not for ever."""

from __future__ import annotations

import hashlib
import threading
import time

from worker.measure.resting import Resting, helpers_run


def busy(iterations: int) -> None:
    """Work outside the interpreter's lock, as a library's helper threads do."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", iterations)


def iterations_for(seconds: float) -> int:
    start_s = time.perf_counter()
    busy(20_000)
    return int(20_000 * seconds / (time.perf_counter() - start_s))


def test_a_helper_is_waited_for() -> None:
    ended_s = []

    def work() -> None:
        busy(iterations_for(0.1))
        ended_s.append(time.perf_counter())

    helper = threading.Thread(target=work)
    Resting(calls={"1": helper.start}).first_call("1")
    returned_s = time.perf_counter()
    helper.join()
    assert ended_s[0] < returned_s + 0.05


def test_a_helper_that_does_not_end_is_given_up() -> None:
    helper = threading.Thread(target=busy, args=(iterations_for(1.5),))
    helper.start()
    assert helpers_run()
    Resting().rest()
    assert helper.is_alive()
    helper.join()
