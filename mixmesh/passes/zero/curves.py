"""Checks measured curves, and reads them as tables: the seconds of every micro-batch that a device can
hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base.lazy import lazy
from ...cost import Curve
from ...errors import InputError

# a table holds one float64 per micro-batch size; 2**25 of them are 256 MiB
MAX_TABLE_ENTRIES = 2**25
# a figure outside of these limits is a mistake of units, and its square would overflow
MIN_S, MAX_S = 1e-12, 1e12


@dataclass(frozen=True, eq=False)
class Tables:
    """``distinct[kind[i]][m]`` is the seconds device i takes for a micro-batch of m samples.

    Tables start with 0.0 for no samples, never fall and end at the device's limit. Devices with equal curves
    are of one kind, so that searches handle kinds.
    """

    distinct: tuple[np.ndarray, ...]
    kind: tuple[int, ...]

    @lazy
    def num_devices(self) -> tuple[int, ...]:
        """The number of devices of each kind."""
        return tuple(self.kind.count(k) for k in range(len(self.distinct)))

    def of(self, device: int) -> np.ndarray:
        return self.distinct[self.kind[device]]


def tables(curves: Sequence[Any], largest: int) -> Tables:
    """The tables of ``curves`` (pairs of sizes and seconds), none longer than ``largest`` samples."""
    checked = [_checked(device, curve) for device, curve in enumerate(_items(curves))]
    if not checked:
        raise InputError(
            "there is no device to allocate to", expected="one curve for every device", got="no curves"
        )
    kinds = {curve: None for curve in checked}
    entries = sum(min(int(curve.points[-1][0]), largest) for curve in kinds)
    if entries > MAX_TABLE_ENTRIES:
        raise InputError(
            "the curves reach too far to look at every micro-batch",
            expected=f"at most {MAX_TABLE_ENTRIES} sizes, over all curves that differ",
            got=str(entries),
            hint="count samples (sequences), not tokens",
        )
    number = {curve: n for n, curve in enumerate(kinds)}
    return Tables(tuple(_table(curve, largest) for curve in kinds), tuple(number[curve] for curve in checked))


def _table(curve: Curve, largest: int) -> np.ndarray:
    """Seconds of 0, 1, ... samples. The line is that of ``Curve.at``, with which the tests compare it."""
    sizes, seconds = zip(*curve.rising)
    # below the smallest measured size the line falls to the fixed cost of the affine fit
    fixed = min(curve.affine[0], seconds[0])
    out = np.interp(np.arange(min(int(sizes[-1]), largest) + 1), (0, *sizes), (fixed, *seconds))
    out[0] = 0.0
    # interpolation rounds: a flat curve must not fall in the last digit
    return np.maximum.accumulate(out)


def _items(value: Any) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        raise InputError(
            "curves must be a sequence", expected="one (sizes, seconds) pair per device", got=repr(value)
        ) from None


def _checked(device: int, curve: Any) -> Curve:
    pair = "a pair of sequences: micro-batch sizes and their seconds"
    try:
        sizes, seconds = (list(part) for part in curve)
    except (TypeError, ValueError):
        raise _bad(device, "is not a curve", pair, _short(curve)) from None
    if len(sizes) != len(seconds):
        got = f"{len(sizes)} sizes and {len(seconds)} times"
        raise _bad(device, "has sizes and times that do not match", "as many of one as of the other", got)
    if not sizes:
        raise _bad(
            device,
            "has an empty curve",
            "at least one measured micro-batch",
            "none",
            "leave a device out that cannot hold a single sample",
        )
    for size in sizes:
        if not is_whole(size) or size < 1:
            raise _bad(device, "has a bad micro-batch size", "integers of at least 1", repr(size))
    for one, next_ in zip(sizes, sizes[1:]):
        if next_ <= one:
            expected = "sizes that ascend, each once"
            raise _bad(device, "has its micro-batch sizes out of order", expected, f"{next_} after {one}")
    for size, time_s in zip(sizes, seconds):
        if not is_number(time_s) or not MIN_S <= time_s <= MAX_S:
            expected = f"finite and positive, {MIN_S:g} to {MAX_S:g}"
            got = f"{time_s!r} at micro-batch {size}"
            raise _bad(device, "has a bad time in seconds", expected, got)
    return Curve(tuple((int(size), float(time_s)) for size, time_s in zip(sizes, seconds)))


def _bad(device: int, what: str, expected: str, got: str, hint: str = "") -> InputError:
    return InputError(
        f"device {device} {what}", where=f"curves[{device}]", expected=expected, got=got, hint=hint
    )


def is_whole(value: Any) -> bool:
    """Whether a value is an integer of Python or numpy, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number of Python or numpy."""
    return (is_whole(value) or isinstance(value, float | np.floating)) and math.isfinite(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
