"""Passes of a step with what times them: their works, and a call for each of their collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..cost.placed import Sheet
from ..step import Compute, Pass, Start
from ..step.events import End
from ..step.works import works_by_part
from .channels import Channels
from .values import Call


class TimedSegment(NamedTuple):
    """As ``Segment``, with the number of each computation's work in the sheet."""

    works: tuple[int, ...]
    computes: tuple[Compute, ...]
    end: End | None


@dataclass(frozen=True)
class TimedPass:
    """A pass with the works of its computations and the ``calls`` of its collectives, by their numbers.
    ``counts`` is how often each work stands in each segment that has any."""

    order: Pass
    segments: tuple[TimedSegment, ...]
    counts: np.ndarray
    calls: tuple[Call, ...]
    product_work_of: dict[int, int]

    @property
    def started(self) -> tuple[Call, ...]:
        """All calls, as often as the pass makes them."""
        starts = (segment.end for segment in self.segments if isinstance(segment.end, Start))
        return tuple(self.calls[start.number] for start in starts)

    def product_of(self, start: Start) -> tuple[int, str]:
        """The work of what is computed when a collective is taken in, -1 without any, and its name."""
        if start.product is None:
            return -1, start.name
        return self.product_work_of[start.product.at], self.order.name_of(start.product)[0]

    def on(self, order: Pass, network: Channels) -> TimedPass:
        """The same pass on the ranks of ``order``."""
        return TimedPass(order, self.segments, self.counts, calls_of(order, network), self.product_work_of)


def timed(order: Pass, sheet: Sheet, network: Channels) -> TimedPass:
    """A pass with the works of ``sheet``."""
    work_of = works_by_part(sheet)
    segments = tuple(
        [
            TimedSegment(tuple([work_of[part][n] for part, n in computes]), computes, end)
            for computes, end in order.script.segments
        ]
    )
    busy = [segment.works for segment in segments if segment.works]
    counts = np.zeros((len(busy), len(sheet.works)))
    for row, works in zip(counts, busy):
        for work in works:
            row[work] += 1
    return TimedPass(order, segments, counts, calls_of(order, network), sheet.factor_work_of)


def calls_of(order: Pass, network: Channels) -> tuple[Call, ...]:
    """A call for each collective of a pass."""
    return tuple([network.call(exchange, purpose) for exchange, purpose in order.exchanges])


@dataclass(frozen=True)
class Parts:
    """All of a simulated step that its clocks do not change. ``slowdown`` is how much slower
    each rank computes while a collective is under way; ``loss`` is the reduction of the loss."""

    sheet: Sheet
    network: Channels
    slowdown: tuple[float, ...]
    forward: TimedPass
    backward: TimedPass
    loss: Call | None
