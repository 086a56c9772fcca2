"""A ratio per segment of the model (HAP, EuroSys'24, section 5.2), for devices whose relative speeds differ
from one operator to the next.

A segment is a run of groups, with the shares at which all devices finish its work at the same time. Between
two segments samples move to other ranks. A dynamic programme over estimates finds where to cut; the simulator
says whether it pays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..cost.exchanges import Exchange, sent_between
from ..lang.ir import Ratio, make_ratio
from ..passes.zero import with_owners
from ..search.placement import Placed, Space
from .hap import synthesised
from .passes.shares import whole_counts
from .placed import judged
from .proposal import Proposal
from .spaces import space_of
from .task import Task

MAX_SEGMENTS = 4
MAX_BORDERS = 24  # places where a segment may end: those crossed by the fewest bytes


def segments(task: Task) -> Iterator[Proposal]:
    """The programs of data parallelism and of the synthesis, each with one ratio and with two to four."""
    space = space_of(task)
    strategies: dict[tuple[Placed, ...], None] = {}
    with task.timed("ratios"):
        for last in Chain(space).cheapest(MAX_SEGMENTS):
            strategies[tuple(map(Placed, last.spread(space.batch)))] = None
    start = task.proposed.get("hap") or min(synthesised(task), key=lambda p: p.key, default=None)
    if start is not None:
        yield replace(start, planner="segments")
    # programs of hap may have owners of gradients, by ratios that strategies do not have
    synthesis = () if start is None else (with_owners(start.program, {}),)
    for base in (space.program, *synthesis):
        for strategy in strategies:
            task.progress(f"planning: segments, {len(set(strategy))}")
            yield judged(task, "segments", Space(base, task.costs, space.grouping), strategy)


@dataclass(frozen=True)
class Segment:
    """Groups from ``start`` to ``stop`` under a ratio; ``seconds`` includes all segments before it, and the
    moves."""

    start: int
    stop: int
    ratio: Ratio
    seconds: float
    before: Segment | None = None

    def spread(self, batch: int) -> list[Ratio]:
        """The ratio of each group up to the end of this segment, rounded to samples."""
        mine = [make_ratio(whole_counts(self.ratio, batch))] * (self.stop - self.start)
        return [*(self.before.spread(batch) if self.before else ()), *mine]


class Chain:
    """The groups of a space in their order, as prefix sums of fixed and per-share seconds per device."""

    def __init__(self, space: Space) -> None:
        self.space, self.costs = space, space.costs
        class_of = self.costs.class_of
        lines = [[np.add(g.forward[c], g.backward[c]) for c in class_of] for g in space.groups]
        self.sums = np.concatenate([np.zeros((1, len(class_of), 2)), np.cumsum(lines, axis=0)])
        crossing = np.zeros(len(space.groups) + 1)  # bytes, in both directions, that cross each border
        for v in space.grouping.values:
            crossing[v.source + 1 : max(v.targets) + 1] += v.size_bytes * (1 + v.gradient)
        self.crossing = crossing
        # groups end where few bytes cross
        inner = sorted(range(1, len(space.groups)), key=lambda n: crossing[n])[: MAX_BORDERS - 1]
        self.borders = (*sorted(inner), len(space.groups))
        self.ranks = tuple(range(len(class_of)))
        self._segments: dict[tuple[int, int], tuple[Ratio, float]] = {}

    def cheapest(self, most: int) -> Iterator[Segment]:
        """For one segment, for two, and up to ``most``, the last segment of the cheapest chain."""
        ends = {(0, stop): self._segment(0, stop, None) for stop in self.borders}
        for count in range(most):
            if count:
                longer: dict[tuple[int, int], Segment] = {}
                for (_, at), before in ends.items():
                    for stop in self.borders:
                        if stop > at:
                            segment = self._segment(at, stop, before)
                            if (at, stop) not in longer or segment.seconds < longer[at, stop].seconds:
                                longer[at, stop] = segment
                ends = longer
            whole = [s for (_, stop), s in ends.items() if stop == self.borders[-1]]
            if whole:
                yield min(whole, key=lambda s: s.seconds)

    def _segment(self, start: int, stop: int, before: Segment | None) -> Segment:
        if (start, stop) not in self._segments:
            fixed, slope = (self.sums[stop] - self.sums[start]).T
            self._segments[start, stop] = balanced(fixed, slope)
        ratio, seconds = self._segments[start, stop]
        if before is not None:
            sent = sent_between(before.ratio, ratio)
            size = round(self.crossing[start])
            seconds += before.seconds + Exchange("all_to_all", size, self.ranks, sent).seconds(self.costs)
        return Segment(start, stop, ratio, seconds, before)


def balanced(fixed: np.ndarray, slope: np.ndarray) -> tuple[Ratio, float]:
    """Shares ``r`` that sum to 1 and minimise ``max over j of fixed_j + slope_j r_j``, and that minimum: the
    LP of one phase in closed form. A device whose fixed work alone takes longer gets no share."""
    order = np.argsort(fixed)
    slope = np.maximum(slope, 1e-12)
    for count in range(len(order), 0, -1):
        ranks = order[:count]
        least = (1 + (fixed[ranks] / slope[ranks]).sum()) / (1 / slope[ranks]).sum()
        if least > fixed[ranks].max() or count == 1:
            break
    shares = np.zeros(len(fixed))
    shares[ranks] = (least - fixed[ranks]) / slope[ranks]
    return make_ratio(np.maximum(shares, 0.0)), float(least)
