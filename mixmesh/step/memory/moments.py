"""Moments of a step: the bytes that are held at one time, by how they are cut."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ...lang.ir import Cut, Instruction

Sizes = dict[Cut, float]
BUCKET = "a bucket of gradients"
BEFORE = "before the first step"  # in place of an event
OPTIMIZER = "optimizer"  # the name of the optimizer's event


class Moment(NamedTuple):  # made by the thousand, in a third of a frozen dataclass's time
    """Unsharded bytes held at one time, by how they are cut. ``small`` are those that come and go in a CPU's
    heap. ``event`` is the name of the timeline's event at this time (see ``timeline``), empty if it has
    none."""

    what: str
    held: Sizes
    small: Mapping[Cut, float] = MappingProxyType({})
    event: str = ""


def result_name(i: Instruction) -> str:
    """The name that a computation's events have."""
    return next((r for r in i.results if r is not None), i.op)
