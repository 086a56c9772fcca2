"""A collective of a simulated step, with all that does not depend on when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cost.exchanges import Exchange
from ..lang.plan_file import MicroBatch

MicroBatches = tuple[MicroBatch, ...] | None  # per rank; None, or one each, is a step without micro-steps
Seconds = Sequence[Sequence[float]]  # by work and kind of rank


@dataclass(frozen=True, slots=True)
class Call:
    """A collective with all that does not depend on when it starts."""

    exchange: Exchange
    channel: int
    seconds: float
    links: tuple[tuple[int, float], ...]  # by number, seconds for which it occupies each
    longest: float  # among these
    yields: bool  # a gradient sum, which nobody waits for soon
    host: tuple[float, ...]  # per rank of the exchange: half of what it costs the computing thread, or empty
    beside: tuple[float, ...]  # the same of the threads that communicate, where devices rest
    lag_s: float = 0.0  # after its end, until what it brings is there
