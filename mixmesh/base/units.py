"""Exact conversion between the units of files (Gbit/s, GiB, us) and the SI base units of values.

Each conversion rounds once, at its end: a figure that ``in_unit`` prints is read back as the same float by
``si``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction

GIB = 2**30
MIB = Fraction(2**20)
GBIT = Fraction(10**9, 8)  # bytes
GBYTE = Fraction(10**9)
TFLOP = Fraction(10**12)
MICRO = Fraction(1, 10**6)
PICO = Fraction(1, 10**12)
ONE = Fraction(1)


def si(number: Decimal | float, unit: Fraction) -> float:
    """Converts a number in ``unit`` to the SI base unit."""
    # through text: 15.7 means the decimal as written, not the nearest binary fraction
    return float(Fraction(str(number)) * unit)


def si_bytes(gib: Decimal | float) -> int:
    """Converts GiB to whole bytes, at least one."""
    return max(1, round(Fraction(str(gib)) * GIB))


def in_unit(value: float, unit: Fraction) -> str:
    """Returns the shortest decimal that ``si`` reads back as ``value``."""
    return _shortest(value, unit, float)


def in_gib(size_bytes: int) -> str:
    """Returns the shortest decimal that ``si_bytes`` reads back as ``size_bytes``."""
    return _shortest(size_bytes, ONE * GIB, round)


def _shortest(value: float, unit: Fraction, read: Callable[[Fraction], float]) -> str:
    exact = Fraction(value) / unit
    for digits in range(1, 40):  # 17 digits identify a float
        text = f"{_rounded(exact, digits):f}"
        if read(Fraction(text) * unit) == value:
            return text
    raise AssertionError(f"no decimal of 40 digits reads back as {value!r}")


def _rounded(exact: Fraction, digits: int) -> Decimal:
    """``exact`` to about ``digits`` significant digits."""
    if exact == 0:
        return Decimal(0)
    scale = digits - (len(str(exact.numerator)) - len(str(exact.denominator)))
    return Decimal(round(exact * Fraction(10) ** scale)).scaleb(-scale).normalize()


def number_text(value: float, digits: int = 3) -> str:
    """Formats a finite number for people, rounded to ``digits`` significant digits, without an exponent:
    ``0.00123``, ``1000``."""
    return f"{Decimal(f'{value:.{digits}g}'):f}"


def size_text(size_bytes: float) -> str:
    """Formats a size for people: ``1.25 GiB``, ``340 MiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            size = size_bytes / unit
            return f"{number_text(size) if size < 1000 else f'{size:.0f}'} {name}"
    return f"{size_bytes:.0f} B"


def seconds_text(value: float) -> str:
    """Formats a time for people: ``1.25 s``, ``340 ms``; ``-`` if it is not finite."""
    if not math.isfinite(value):
        return "-"
    if value >= 1:
        return f"{number_text(value)} s"
    return f"{number_text(value * 1e3)} ms" if value >= 1e-3 else f"{number_text(value * 1e6)} us"


def link_text(bytes_per_s: float) -> str:
    """Formats a link's speed for people: ``10 Gbit/s``."""
    return f"{number_text(bytes_per_s / float(GBIT))} Gbit/s"


def flop_rate_text(flop_per_s: float) -> str:
    """Formats a device's speed for people: ``8.1 TFLOP/s``, ``40 GFLOP/s``."""
    scale, unit = (1e12, "TFLOP/s") if flop_per_s >= 1e12 else (1e9, "GFLOP/s")
    return f"{number_text(flop_per_s / scale)} {unit}"


def memory_rate_text(bytes_per_s: float) -> str:
    """Formats a memory's speed for people: ``320 GB/s``."""
    return f"{number_text(bytes_per_s / float(GBYTE))} GB/s"


def plural(count: int, noun: str) -> str:
    """Formats a count for people: ``1 device``, ``3 devices``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def ranks_text(ranks: Sequence[int]) -> str:
    """Names ranks for people: ``rank 1``, ``ranks 0, 2``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
