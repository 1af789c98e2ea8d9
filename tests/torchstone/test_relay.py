"""Output of several programs in one stream: whole lines, each behind its name."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from torchstone.relay import Relay


def test_lines_are_whole_and_named() -> None:
    out = io.BytesIO()
    relay = Relay(["broker", "api"], out, colour=False)
    relay.feed("api", b"half a ")
    relay.feed("broker", b"first\n\n  \nsecond\n")
    relay.feed("api", b"line\nno end")
    relay.flush("api")
    relay.flush("api")
    assert out.getvalue().decode().splitlines() == [
        "broker | first",
        "broker | second",
        "api    | half a line",
        "api    | no end",
    ]


def test_hushed_lines_are_dropped_and_endless_ones_are_cut() -> None:
    out = io.BytesIO()
    relay = Relay(["a"], out, colour=False)
    relay.feed("a", b"WARNING of nothing\nnews\n", hush=("of nothing",))
    relay.feed("a", b"x" * 200_000)
    assert out.getvalue().startswith(b"a | news\na | xxx")
    assert len(out.getvalue()) > 200_000


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    with full.open("wb", buffering=0) as out:
        Relay(["a"], out).feed("a", b"line\n")


def test_names_are_coloured_on_a_terminal_only() -> None:
    out = io.BytesIO()
    Relay(["a"], out, colour=True).feed("a", b"line\n")
    assert out.getvalue().startswith(b"\033[36ma |\033[0m ")
    plain = io.BytesIO()
    Relay(["a"], plain).feed("a", b"line\n")
    assert b"\033" not in plain.getvalue()
