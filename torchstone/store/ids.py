"""Job ids: UUIDs of version 7 (RFC 9562), so that sorting by id is sorting by creation.

    new_id()      # "0199b1c2-...": later than every id this process made before, whichever thread asks

The time's 48 bits of milliseconds are followed by 12 bits of 1/4096 ms (method 3 of section 6.2). Two processes order
their ids by their clocks: to a fraction of a millisecond on one machine.
"""

from __future__ import annotations

import secrets
import threading
import time
from uuid import UUID

_lock = threading.Lock()
_last_tick = 0


def new_id() -> str:
    """A fresh id, greater than the one before it."""
    global _last_tick
    with _lock:
        _last_tick = tick = max(_last_tick + 1, time.time_ns() * 4096 // 1_000_000)
    milliseconds, fraction = divmod(tick, 4096)
    version, variant = 7, 0b10
    return str(UUID(int=milliseconds << 80 | version << 76 | fraction << 64 | variant << 62 | secrets.randbits(62)))


def first_id(epoch_us: int) -> str:
    """What every id made from this time on is greater than, and every earlier one smaller."""
    return str(UUID(int=max(0, epoch_us) // 1000 << 80))
