"""Passes of a step with the facts that time them: a work for each computation, a call for each collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..cost.cold import Cold
from ..cost.placed import Sheet
from ..step import Compute, Pass, Start
from ..step.events import End
from ..step.works import works_by_part
from .channels import Channels
from .values import Call


class TimedSegment(NamedTuple):
    """A ``Segment`` with the number of each computation's work in the cost table."""

    works: tuple[int, ...]
    computes: tuple[Compute, ...]
    end: End | None


@dataclass(frozen=True)
class TimedPass:
    """A pass with the works of its computations and the ``calls`` of its collectives, by number. For each
    segment with computations, ``counts`` says how often it has each work."""

    order: Pass
    segments: tuple[TimedSegment, ...]
    counts: np.ndarray
    calls: tuple[Call, ...]
    product_work_of: dict[int, int]

    @property
    def started(self) -> tuple[Call, ...]:
        """The calls that the pass starts, in order, including repeated ones."""
        starts = (segment.end for segment in self.segments if isinstance(segment.end, Start))
        return tuple(self.calls[start.number] for start in starts)

    def product_of(self, start: Start) -> tuple[int, str]:
        """The work of the computation that follows the arrival of a collective's result, and its name; -1 if
        there is none."""
        if start.product is None:
            return -1, start.name
        return self.product_work_of[start.product.at], self.order.name_of(start.product)[0]

    def on(self, order: Pass, network: Channels) -> TimedPass:
        """The same pass on the ranks of ``order``."""
        return TimedPass(order, self.segments, self.counts, calls_of(order, network), self.product_work_of)


def time_pass(order: Pass, sheet: Sheet, network: Channels) -> TimedPass:
    """Looks up the works of a pass in a cost table, and adds its calls to the network."""
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
    """Adds a call for each collective of a pass."""
    return tuple([network.call(exchange, purpose, has_nodes=True) for exchange, purpose in order.exchanges])


@dataclass(frozen=True)
class Parts:
    """The constant parts of a simulated step. ``slowdown`` is each rank's slowdown of computing while a
    collective is under way, ``cold`` its extra seconds of a call after computing; ``loss`` is the all-reduce
    of the loss."""

    sheet: Sheet
    network: Channels
    slowdown: tuple[float, ...]
    cold: tuple[Cold, ...]
    forward: TimedPass
    backward: TimedPass
    loss: Call | None
