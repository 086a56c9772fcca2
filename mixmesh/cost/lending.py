"""Operators that a profile has of one device only, for other devices of its kind.

A slow device has time to measure only some operators, on few shares. What it lacks takes as many times longer
than on another device as the operators that both have measured: an operator's own time on another device says
more about it than the operators of its class do. One measured at a single share takes as many times longer at
other shares as it does on another device. If all devices have measured it at a single share each, a device
has the points of the others too, with their seconds at its own pace. A product that no device has measured
with other inputs cut takes as many times longer so as the same products of other sizes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace

from .curve import Curve
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
    """The seconds of ``one`` over those of ``other``, forward, at a share that both have measured, or at the
    only share of one of them; None if there is none."""
    ranges = [(op.forward.points[0][0], op.forward.points[-1][0]) for op in (one, other)]
    least, most = max(first for first, _ in ranges), min(last for _, last in ranges)
    single = [first for first, last in ranges if first == last]
    if least <= 0 or (least > most and len(single) != 1):
        return None
    share = math.sqrt(least * most) if least <= most else single[0]
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


def lacks(op: OpMeasurement, cut: str) -> bool:
    """Whether another device may know more of an operator with these inputs cut."""
    return (cut != "" and cut not in op.cuts) or len(op.forward.points) == 1


def with_shape(op: OpMeasurement, lent: OpMeasurement) -> OpMeasurement:
    """The operator with curves in the shape of those of ``lent`` if it was measured at one share only."""
    forward, backward = op.forward.shaped(lent.forward), op.backward.shaped(lent.backward)
    return replace(op, forward=forward, backward=backward)


def with_others(op: OpMeasurement, others: Iterable[OpMeasurement]) -> OpMeasurement:
    """The operator with curves through its only point and those of ``others``, in seconds of its device. A
    product of few rows takes about as long for fewer: a line through the origin would promise too little for
    fewer rows, and too much for more."""
    forward, backward = op.forward, op.backward
    for other in others:
        forward = forward.joined(_within(other.forward, op.forward))
        backward = backward.joined(_within(other.backward, op.backward))
    return replace(op, forward=forward, backward=backward)


def _within(lent: Curve, own: Curve) -> Curve:
    """The points of ``lent``, with at least the seconds of the only point of ``own`` for more work, and at
    most these for less: where the devices' pace says otherwise, what a device has measured itself counts."""
    share, seconds = own.points[0]
    return Curve(tuple((s, max(t, seconds) if s > share else min(t, seconds)) for s, t in lent.points))


def longer_if_cut(name: str, cut: str, known: Iterable[Mapping[str, OpMeasurement]]) -> tuple[float, float]:
    """How many times longer the operators called ``name`` take, forward and backward, with these inputs cut
    than as in data parallelism: medians over all that were measured in both ways, and at least 1."""
    both = [
        [times_longer(f, op.forward), times_longer(b, op.backward)]
        for ops in known
        for key, op in ops.items()
        if key.startswith(f"{name}(") and cut in op.cuts
        for f, b in [op.cuts[cut]]
    ]
    forward, backward = [statistics.median(each) for each in zip(*both)] or (1.0, 1.0)
    return max(forward, 1.0), max(backward, 1.0)


def times_longer(one: Curve, other: Curve) -> float:
    """The seconds of ``one`` over those of ``other``, at the middle of the shares measured for ``one``."""
    share = math.sqrt(one.points[0][0] * one.points[-1][0])
    seconds = other.at(share)
    return one.at(share) / seconds if seconds > 0 else 1.0
