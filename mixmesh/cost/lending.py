"""Operators that a profile has of one device only, for other devices of its kind.

A slow device has time to measure only some operators, on few shares. What it lacks takes as many times longer
than on another device as the operators that both have measured: an operator's own time on another device says
more about it than the operators of its class do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from .profile import OpMeasurement


def pace(
    own: Mapping[str, OpMeasurement], other: Mapping[str, OpMeasurement], *, product: bool
) -> float | None:
    """The median of a device's seconds over another's, for the products or the other operators that both have
    measured; None if there are none."""
    ratios = [ratio(op, other[key]) for key, op in own.items() if key in other and bool(op.flop) == product]
    known = [r for r in ratios if r is not None]
    return statistics.median(known) if known else None


def ratio(one: OpMeasurement, other: OpMeasurement) -> float | None:
    """The seconds of ``one`` over those of ``other``, forward, at a share that both have measured; None if
    there is none."""
    ranges = [(op.forward.points[0][0], op.forward.points[-1][0]) for op in (one, other)]
    least, most = max(first for first, _ in ranges), min(last for _, last in ranges)
    if not 0 < least <= most:
        return None
    share = math.sqrt(least * most)
    seconds = other.forward.at(share)
    return one.forward.at(share) / seconds if seconds > 0 else None


def slower(op: OpMeasurement, factor: float) -> OpMeasurement:
    """The operator with ``factor`` times its seconds."""
    cuts = {cut: (f.scaled(factor), b.scaled(factor)) for cut, (f, b) in op.cuts.items()}
    return replace(op, forward=op.forward.scaled(factor), backward=op.backward.scaled(factor), cuts=cuts)


def with_cuts(op: OpMeasurement, lent: OpMeasurement) -> OpMeasurement:
    """The operator with the curves for other cut inputs that only ``lent`` has, at the pace of ``op``."""
    factor = ratio(op, lent)
    return op if factor is None else replace(op, cuts={**slower(lent, factor).cuts, **op.cuts})
