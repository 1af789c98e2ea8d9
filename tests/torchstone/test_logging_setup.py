"""Log lines for people and for programs: context stands on every line, also on those of libraries."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, sys, structlog
from torchstone.logging_setup import configure_logging
configure_logging("info", "worker", sys.argv[1])
structlog.contextvars.bind_contextvars(job_id="0199", attempt=2)
structlog.get_logger("ours").info("started", devices=["cpu:0"])
logging.getLogger("a.library").warning("%s happened", "it")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger("ours").exception("failed")
structlog.get_logger("ours").debug("too low to be heard")
"""


def lines(log_format: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_every_line_for_a_program_is_an_object_with_its_context() -> None:
    documents = [json.loads(line) for line in lines("json")]
    assert [document["event"] for document in documents] == ["started", "it happened", "failed"]
    for document in documents:
        assert (document["job_id"], document["attempt"], document["part"]) == ("0199", 2, "worker")
        assert document["timestamp"].endswith("Z") and document["level"]
    assert documents[0]["devices"] == ["cpu:0"]
    assert "ZeroDivisionError" in documents[2]["exception"]


def test_lines_for_people_say_the_same() -> None:
    text = lines("text")
    assert "started" in text[0] and "job_id=0199" in text[0] and "attempt=2" in text[0]
    assert "it happened" in text[1] and "job_id=0199" in text[1]
    assert any("ZeroDivisionError" in line for line in text[2:])
