"""The chapter's "latency numbers that every programmer should know", filled in with this machine's own figures.

    table = latency_table(result.figures)        # rows: event, the chapter's figure, this machine's, how it was had

What was not measured here (no such device, no such probe in the job, another data centre) has a dash and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torchstone.quantities import quantity
from torchstone.results import Figure, Table

NAME = "latency numbers that every programmer should know"
_MEGABYTE = 1e6


@dataclass(frozen=True)
class Event:
    """A row of the table: the chapter's time, and the figure that is its like here."""

    what: str
    chapter: str
    probe: str
    name: str = ""
    at: dict[str, Any] = field(default_factory=dict)
    """The part of the figure's point that tells it from others of its name."""
    megabyte: bool = False
    """The figure is a rate: told is the time of 1 MB at it."""


EVENTS = (
    Event("L1 cache reference or hit", "1.5 ns", "cache", "latency", {"level": "L1"}),
    Event("floating-point add, mult or FMA", "1.5 ns", "vector", "fma_latency"),
    Event("L2 cache reference or hit", "5 ns", "cache", "latency", {"level": "L2"}),
    Event("branch mispredict", "6 ns", "vector", "branch_miss"),
    Event("L3 cache hit", "16 to 40 ns", "cache", "latency", {"level": "L3"}),
    Event("mutex lock and unlock, uncontended", "25 ns", "vector", "mutex"),
    Event("memory reference, huge pages", "46 to 70 ns", "memory", "latency", {"pages": "huge"}),
    Event("memory reference, small pages (with TLB miss)", "", "memory", "latency", {"pages": "small"}),
    Event("1 MB sequentially from memory", "", "memory", "sequential_read", {"direction": "forward"}, megabyte=True),
    Event("turn handed to another process", "", "process", "semaphore_handover"),
    Event("8 bytes over loopback TCP, one way", "", "network", "tcp_handover", {"message_bytes": 8}),
    Event("HTTP request to the service, there and back", "", "network", "http_latency"),
    Event("4 KB over 100 Gb fabric", "1 µs", ""),
    Event("4 KB over 10 Gb Ethernet", "10 µs", ""),
    Event("4 KB random read from storage", "120 µs (NVMe)", "storage", "read_latency", {"block_bytes": 4096}),
    Event("4 KB random write to storage", "30 µs (NVMe)", "storage", "write_latency", {"block_bytes": 4096}),
    Event("1 MB read from storage", "208 µs (NVMe), 2 ms (SATA)", "storage", "read_latency", {"block_bytes": 1 << 20}),
    Event("4 KB appended and made safe (fsync)", "", "storage", "fsync_append"),
    Event("round trip within a data centre", "500 µs", ""),
    Event("packet across an ocean and back", "150 ms", ""),
    Event("GPU kernel launch, and its end", "10 µs", "host_device", "launch_completes"),
    Event("1 MB host to GPU, pinned", "80 µs (PCIe)", "host_device", "to_device", {"memory": "pinned"}, True),
    Event("1 MB GPU to GPU", "30 µs (NVLink)", "device_device", "peer_copy", megabyte=True),
)


def latency_table(figures: Iterable[Figure], asked: Iterable[str]) -> Table:
    """The table; a row without a figure says why there is none. `asked`: the probes that the job was to run."""
    known, probes = list(figures), set(asked)
    rows = [[event.what, event.chapter, *_here(event, known, probes)] for event in EVENTS]
    return Table(name=NAME, columns=["event", "the chapter", "here", "how"], rows=rows)


def _here(event: Event, figures: list[Figure], asked: set[str]) -> list[str]:
    if not event.probe:
        return ["-", "one host alone cannot tell"]
    figure = next((figure for figure in figures if _fits(event, figure)), None)
    if figure is None or figure.value is None:
        if event.probe not in asked:
            missing = f"the probe {event.probe} was not asked for"
        elif any(figure.of == event.probe for figure in figures):
            missing = "not found on this machine"
        else:
            missing = f"the probe {event.probe} found nothing"
        return ["-", (figure.reason if figure else None) or missing]
    seconds = _MEGABYTE / figure.value if event.megabyte else figure.value
    where = ", ".join(f"{key}={value}" for key, value in figure.at.items())
    return [quantity(seconds, "s"), f"{figure.of} {figure.name}" + (f" at {where}" if where else "")]


def _fits(event: Event, figure: Figure) -> bool:
    named = figure.of == event.probe and figure.name == event.name
    return named and all(figure.at.get(key) == value for key, value in event.at.items())
