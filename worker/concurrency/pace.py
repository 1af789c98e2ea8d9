"""How much work a budget holds: a product is timed first, then repeats, and where that is not enough sizes, are cut.

    pace = Pace(**crew.ask("probe", "measure", size=4000))                 # 1.6 s a product on a core, say
    fit(pace, 50, least=1, cost=Cost(products=8), share_s=120, at={}).repeats    # 1

A part is to have `ROUNDS` rounds within its share of the budget; what is cut is said by a code, never silently.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchstone.results import Code
from worker.concurrency.products import matrix
from worker.measure.stopwatch import SETTLE_BELOW_S

ROUNDS = 8
"""Fewer than 6 give no interval; warming up takes about two more."""
SMALLEST_SIZE = 64
SHARES = {"concurrency": 4.0, "overlap": 3.0, "streams": 2.0, "schedule": 1.5}
"""Of the budget, in proportion, among the parts that are asked for."""
_FIRST_SIZE = 256
_LONG_ENOUGH_S = 0.05


@dataclass(frozen=True)
class Pace:
    """Seconds on one device: of a product, of copying its result (to the host), and of comparing it."""

    size: int
    product_s: float
    copy_s: float
    check_s: float


@dataclass(frozen=True)
class Cost:
    """What all lanes of a part together do in a round, for one repeat."""

    products: float
    copies: float = 0.0
    checks: float = 0.0

    def seconds(self, pace: Pace, size: int) -> float:
        """At another size: products by the number of operations, the others by that of bytes."""
        scale = size / pace.size
        return self.products * pace.product_s * scale**3 + (
            (self.copies * pace.copy_s + self.checks * pace.check_s) * scale**2
        )


@dataclass(frozen=True)
class Fit:
    """What is timed in place of what was asked for."""

    size: int
    repeats: int
    codes: tuple[Code, ...]


class Probe:
    """Times a product, in a process of its own on the first device."""

    def __init__(self, dtype: str, seed: int, device: str) -> None:
        self.dtype, self.seed, self.device = getattr(torch, dtype), seed, device

    def measure(self, size: int) -> dict[str, float]:
        """The fields of a Pace: from a smaller product, where that takes long enough to tell."""
        probed = min(size, _FIRST_SIZE)
        while True:
            x = matrix(probed, self.dtype, self.seed, self.device)
            product_s = self._second(lambda x=x: x @ x)  # type: ignore[misc]
            if probed == size or product_s > _LONG_ENOUGH_S:
                break
            probed = min(size, 2 * probed)
        y = (x @ x).clone()
        copy_s = self._second(lambda: y.cpu().clone())
        check_s = self._second(lambda: (y - x).abs().max().item()) + self._second(lambda: y.fill_(torch.nan))
        scale = size / probed
        area_s = {"copy_s": copy_s * scale**2, "check_s": check_s * scale**2}
        return {"size": size, "product_s": product_s * scale**3, **area_s}

    def _second(self, call: Callable[[], object]) -> float:
        """Seconds of the second call: the first one pays for what is made once."""
        call()
        self._synchronize()
        begun_s = time.perf_counter()
        call()
        self._synchronize()
        return time.perf_counter() - begun_s

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.accelerator.synchronize(0)


def fit(pace: Pace, asked_repeats: int, least: int, cost: Cost, share_s: float, at: dict[str, Any]) -> Fit:
    """The most repeats, not under `least`, and the largest size with which `ROUNDS` rounds fit into `share_s`.

    `least` may be more than was asked for: then that is kept.
    """
    least = min(least, asked_repeats)
    round_s = share_s / (ROUNDS + 2)
    size = pace.size
    while size // 2 >= SMALLEST_SIZE and _held(pace, size, cost, round_s, least) < least:
        size //= 2
    repeats = min(asked_repeats, max(least, _held(pace, size, cost, round_s, asked_repeats)))
    codes, told = list[Code](), {"at": at, "budget_s": share_s, "product_s": pace.product_s}
    for code, asked, timed in (
        ("size_cut_short", pace.size, size),
        ("repeats_cut_short", asked_repeats, repeats),
    ):
        if timed < asked:
            evidence = {**told, "asked": asked, "timed": timed}
            codes.append(Code(code=code, severity="warning", evidence=evidence))
    return Fit(size, repeats, tuple(codes))


def _held(pace: Pace, size: int, cost: Cost, round_s: float, repeats: int) -> int:
    """How many repeats fit into a round."""
    held = int(round_s / cost.seconds(pace, size))
    if min(held, repeats) * pace.product_s * (size / pace.size) ** 3 < SETTLE_BELOW_S:
        held //= 2  # short runs are made once untimed before each timed one
    return held


def share_s(left_s: float, part: str, to_come: list[str]) -> float:
    """A part's seconds of what is left of the budget; `to_come` are it and those after it."""
    return max(0.0, left_s) * SHARES[part] / sum(SHARES[each] for each in to_come)
