"""The parts of a step: the bound, the busiest device's computing beyond it, and that device's waits, by
kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...base.timeline import STREAMS, Event, Timeline, is_gradient_sum, is_parameter_gather
from ...lang.ir import Program

COMPUTE, COMMUNICATION = STREAMS
COMPUTES, AGAIN, OPTIMIZER = "computes", "computes again", "optimizer"
GRADIENTS, GATHERS, EXCHANGES = "sums of gradients", "gathers of parameters", "other exchanges"
OTHERS = "other devices"
KINDS = (COMPUTES, AGAIN, OPTIMIZER, GRADIENTS, GATHERS, EXCHANGES)  # kinds of events
WAITS = (GRADIENTS, GATHERS, EXCHANGES, OTHERS)  # kinds of waits
PARTS = ("bound", "below the peaks", "computed again", "imbalance", *(f"waits for {kind}" for kind in WAITS))
KindOf = Callable[[Event], str]


def kinds_of(program: Program) -> KindOf:
    """A function that returns the kind of an event of ``program``."""
    stored = {p.result for p in program.params}
    moved = {i.result for i in program.instructions if i.is_redistribution and i.inputs[0] in stored}

    def kind_of(event: Event) -> str:
        base, _, suffix = event.name.partition(" ")
        if event.stream == COMPUTE:
            if event.name == "optimizer":
                return OPTIMIZER
            return AGAIN if suffix == "again" else COMPUTES
        if is_gradient_sum(event.name) or (base in moved and suffix == "grad"):
            return GRADIENTS
        return GATHERS if is_parameter_gather(event.name) or base in moved else EXCHANGES

    return kind_of


def waits(timeline: Timeline, rank: int, kind_of: KindOf) -> dict[str, float]:
    """The seconds in which a rank computes nothing, by what it waits for. If several of its own collectives
    are under way, the one that began first counts; if none is, it waits for other devices."""
    own = [e for e in timeline.events if e.rank == rank and e.end_s > e.start_s]
    busy = [(e.start_s, e.end_s) for e in own if e.stream == COMPUTE]
    under_way = sorted((e for e in own if e.stream == COMMUNICATION), key=lambda e: e.start_s)
    seconds_of = dict.fromkeys(WAITS, 0.0)
    for start_s, end_s in gaps(busy, timeline.step_s):
        at_s = start_s
        for event in under_way:
            begin_s, until_s = max(event.start_s, at_s), min(event.end_s, end_s)
            if until_s > begin_s:
                seconds_of[OTHERS] += begin_s - at_s
                seconds_of[kind_of(event)] += until_s - begin_s
                at_s = until_s
        seconds_of[OTHERS] += end_s - at_s
    return seconds_of


def gaps(spans: Iterable[tuple[float, float]], end_s: float) -> Iterator[tuple[float, float]]:
    """The gaps between ``spans`` in the time from 0 to ``end_s``."""
    at_s = 0.0
    for start_s, until_s in sorted(spans):
        if start_s > at_s:
            yield at_s, start_s
        at_s = max(at_s, until_s)
    if end_s > at_s:
        yield at_s, end_s


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of a step's seconds. No plan is faster than ``bound_s``, which rests on measurements if
    ``is_measured``, else on the peaks of the devices' figures. No simulated step is shorter than ``ideal_s``,
    in which all devices compute all the time, as the cost model estimates."""

    bound_s: float
    ideal_s: float
    is_measured: bool

    @property
    def basis(self) -> str:
        """The source of the bound, in words that follow "all devices computing all the time, "."""
        return "as fast as each was measured" if self.is_measured else "at the peaks of their figures"


@dataclass(frozen=True)
class Parts:
    """The parts that add up to a step: the bound; the time added by kernels below the devices' peaks, which
    gives the ideal; the busiest device's recomputation, and its other computing beyond the ideal; and the
    seconds that it waits for each of ``WAITS``."""

    bounds: Bounds
    again_s: float
    imbalance_s: float
    waits_s: tuple[float, ...]
    busiest: int  # a rank

    @classmethod
    def of(cls, timeline: Timeline, bounds: Bounds, kind_of: KindOf) -> Parts:
        """The parts of the step in a timeline that has events."""
        busiest = busiest_rank(timeline.compute_s)
        busy_s = timeline.compute_s[busiest]
        # no step is shorter than the ideal, except by rounding
        ideal_s = min(bounds.ideal_s, busy_s)
        bounds = replace(bounds, ideal_s=ideal_s, bound_s=min(bounds.bound_s, ideal_s))
        repeated_s = sum(
            e.end_s - e.start_s for e in timeline.events if e.rank == busiest and kind_of(e) == AGAIN
        )
        again_s = min(repeated_s, busy_s - ideal_s)
        waited_s = tuple(waits(timeline, busiest, kind_of).values())
        return cls(bounds, again_s, busy_s - ideal_s - again_s, waited_s, busiest)

    @property
    def busy_s(self) -> float:
        """Seconds that the busiest device computes."""
        return self.bounds.ideal_s + self.again_s + self.imbalance_s

    @property
    def exposed_s(self) -> float:
        """Seconds of waiting that the busiest device's computing does not hide."""
        return sum(self.waits_s)

    @property
    def step_s(self) -> float:
        return self.busy_s + self.exposed_s

    @property
    def seconds(self) -> tuple[float, ...]:
        """The seconds of each of ``PARTS``."""
        below_peaks_s = self.bounds.ideal_s - self.bounds.bound_s
        return (self.bounds.bound_s, below_peaks_s, self.again_s, self.imbalance_s, *self.waits_s)

    def named(self) -> list[tuple[str, float]]:
        """Every part with its name, in the order of the waterfall."""
        about = (
            "the bound",
            "devices below their peaks, as estimated",
            "the busiest device computes again",
            "it computes more than an even part",
            *(f"it waits for {kind}" for kind in WAITS),
        )
        return list(zip(about, self.seconds))


def busiest_rank(compute_s: Sequence[float]) -> int:
    """The rank that computes longest."""
    return max(range(len(compute_s)), key=compute_s.__getitem__)
