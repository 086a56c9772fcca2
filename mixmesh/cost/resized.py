"""Measured operators at other sizes of the batch.

If machines or stages get samples of their own, their programs run the model's operators on, say, 36 of its 64
samples. A profile has the operators for all 64, as curves over the share, which also give the time for 36.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from .curve import Curve
from .profile import OpMeasurement

NUMBER = re.compile(r"\d+")
SAME_WORK = 0.01  # relative tolerance between multiply-adds and those computed from the sizes


class Measured:
    """Measured seconds of a device, by ``op_key``."""

    def __init__(self, ops: Mapping[str, OpMeasurement]) -> None:
        self._ops = ops
        self._alike: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        for key in ops:
            self._alike.setdefault(NUMBER.sub("#", key), []).append((_numbers(key), key))
        self._found: dict[str, OpMeasurement | None] = dict(ops)

    def find(self, key: str, flop: int) -> OpMeasurement | None:
        """The measured operator with this key and these multiply-adds; or else the nearest one whose sizes
        are all the same except for the number of samples, resized."""
        if key not in self._found:
            self._found[key] = self._resized(key, flop)
        return self._found[key]

    def _resized(self, key: str, flop: int) -> OpMeasurement | None:
        numbers = _numbers(key)
        best: tuple[float, float, OpMeasurement] | None = None
        for others, name in self._alike.get(NUMBER.sub("#", key), ()):
            times = _times(numbers, others)
            if times is None or abs(flop - times * self._ops[name].flop) > SAME_WORK * flop:
                continue
            distance = abs(math.log(times))
            if best is None or distance < best[0]:
                best = distance, times, self._ops[name]
        return None if best is None else resized(best[2], best[1])


def _numbers(key: str) -> tuple[int, ...]:
    return tuple(map(int, NUMBER.findall(key)))


def _times(numbers: tuple[int, ...], others: tuple[int, ...]) -> float | None:
    """The common factor by which the sizes that differ are larger; None if they have no common factor."""
    differing = [(a, b) for a, b in zip(numbers, others) if a != b]
    if not differing or not all(a and b for a, b in differing):
        return None
    (first, of), *rest = differing
    return first / of if all(a * of == b * first for a, b in rest) else None


def resized(op: OpMeasurement, times: float) -> OpMeasurement:
    """The operator over ``times`` as many samples. Its time at some share is that of the measured one at
    ``times`` that share; if another input is cut, it scales as the whole operator's does."""

    def shrunk(curve: Curve) -> Curve:
        return Curve(tuple((share / times, seconds) for share, seconds in curve.points))

    def grown(curve: Curve, like: Curve) -> Curve:
        whole = like.at(1.0)
        return curve.scaled(like.at(times) / whole if whole > 0 else times)

    return OpMeasurement(
        shrunk(op.forward),
        shrunk(op.backward),
        round(op.flop * times),
        round(op.moved_bytes * times),
        {cut: (grown(f, op.forward), grown(b, op.backward)) for cut, (f, b) in op.cuts.items()},
    )
