"""Moments of a step: the bytes that are held at one time, by how they are cut."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ...lang.ir import Cut, Instruction, TensorType

Sizes = dict[Cut, float]
BUCKET = "a bucket of gradients"
BEFORE = "before the first step"  # in the place of an event
OPTIMIZER = "optimizer"  # the event
EVERYWHERE: Cut = (0, 1, None)  # whole on every rank


class Moment(NamedTuple):  # made by the thousand, in a third of a frozen dataclass's time
    """Unsharded bytes held at one time, by how they are cut. ``small`` are those that come and go in a CPU's
    heap. ``event`` is the name of the timeline's event at this time (see ``timeline``), empty if it has
    none."""

    what: str
    held: Sizes
    small: Mapping[Cut, float] = MappingProxyType({})
    event: str = ""


def whole(t: TensorType) -> Cut:
    """The cut of a tensor that is whole on the same ranks as ``t``."""
    return 0, 1, t.ratio


def result_name(i: Instruction) -> str:
    """The name that a computation's events have."""
    return next((r for r in i.results if r is not None), i.op)
