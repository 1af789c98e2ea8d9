"""Numbers as an engineer writes them: four significant digits, a unit that fits, the same unit down a column.

    scale([1.2e-05, 3.4e-05], "s")          # Scale(factor=1e6, unit="µs")
    number(12.3456)                          # "12.35"
    quantity(5.1e9, "B/s")                   # "5.100 GB/s"

Only s, B, FLOP, their rates, and Hz are scaled, by powers of 1,000; any other unit is shown as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_DIGITS = 4
_SCALED = frozenset({"B", "bytes", "B/s", "bytes/s", "FLOP", "FLOP/s", "Hz"})
_SHORT = {"bytes": "B", "bytes/s": "B/s"}
_SECONDS = ((1e-9, 1e9, "ns"), (1e-6, 1e6, "µs"), (1e-3, 1e3, "ms"), (1.0, 1.0, "s"))
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_AXES = {"s": "s", "bytes_per_s": "B/s", "flop_per_s": "FLOP/s", "algbw": "B/s", "busbw": "B/s"}


@dataclass(frozen=True)
class Scale:
    """Multiply by `factor` to have the value in `unit`."""

    factor: float
    unit: str


def scale(values: Iterable[float | None], unit: str) -> Scale:
    """The unit in which the smallest of `values` is at least 1; zeros and missing values have no say."""
    sizes = [abs(value) for value in values if value is not None and value != 0 and math.isfinite(value)]
    smallest = min(sizes, default=1.0)
    if unit == "s":
        fitting = [(factor, name) for least, factor, name in _SECONDS if smallest >= least]
        return Scale(*fitting[-1]) if fitting else Scale(1e9, "ns")
    if unit in _SCALED and smallest >= 1e3:
        short = _SHORT.get(unit, unit)
        return next(Scale(1 / least, prefix + short) for least, prefix in _LARGE if smallest >= least)
    return Scale(1.0, _SHORT.get(unit, unit))


def number(value: float | None, digits: int = _DIGITS) -> str:
    """`value` with four significant digits; a whole number in full; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    size = math.floor(math.log10(abs(value)))
    if -5 < size < digits:
        return f"{value:.{digits - 1 - size}f}"
    return f"{value:.0f}" if digits <= size < 12 else f"{value:.{digits - 1}g}"


def measure(value: float | None, unit: Scale) -> str:
    """`value` in the unit of a column, always with decimals so that a column lines up; "-" for None."""
    if value is None:
        return "-"
    scaled = value * unit.factor
    size = math.floor(math.log10(abs(scaled))) if scaled else 0
    return f"{scaled:.{max(0, _DIGITS - 1 - max(size, 0))}f}"


def unit_of_axis(name: str) -> str:
    """The unit of a curve's axis `name`, which either is a unit or says what is drawn; "1" where it has none."""
    return _AXES.get(name, name if name.endswith("/s") else "1")


def quantity(value: float | None, unit: str) -> str:
    """A single number with its unit, e.g. 5.1 GB/s; the unit "1" (a ratio) is not shown."""
    if value is None:
        return "-"
    fitting = scale([value], unit)
    shown = number(value * fitting.factor)
    return shown if fitting.unit in ("1", "") else f"{shown} {fitting.unit}"


def error(value: float | None) -> str:
    """The size of an error, e.g. 1.2e-07."""
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"
