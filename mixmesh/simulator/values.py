"""The values that a simulated step is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cost.exchanges import Exchange
from ..lang.plan_file import MicroBatch

# for each rank; None, or one micro-batch each, is a step without accumulation
MicroBatches = tuple[MicroBatch, ...] | None
Seconds = Sequence[Sequence[float]]  # by work and kind of rank


@dataclass(frozen=True, slots=True)
class Call:
    """A collective with all facts that do not depend on its start."""

    exchange: Exchange
    channel: int
    seconds: float
    links: tuple[tuple[int, float], ...]  # the number of each link, and the seconds for which it is occupied
    longest: float  # the largest of these seconds
    yields: bool  # a gradient reduction, which lets earlier traffic pass
    host: tuple[float, ...]  # half of the computing thread's seconds, for each rank of the exchange; or empty
    overlapped: tuple[float, ...]  # half of the communicating threads' seconds, if devices have burst credit
    lag_s: float = 0.0  # seconds from its end until the result can be used
