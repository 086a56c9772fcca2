"""The parts of a simulated step: collectives, runs of computations, ranks that are alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..cost.placed import Exchange
from ..plan_file import MicroBatch

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


class Step(NamedTuple):  # made by the thousand, in a third of a frozen dataclass's time
    """A run of computations, and what comes after it: at most one of the others."""

    works: tuple[int, ...]
    at: tuple[int, ...]  # the instructions that they are
    awaited: str = ""  # a value on its way
    call: Call | None = None
    name: str = ""
    value: str = ""  # the result of the call, awaited later; empty if it never is
    taken_in: tuple[int, str] | None = None  # at the end of the pass: (work of the product or -1, name)
    point: float | None = None  # gradients are complete here
    used: str = ""  # an owned parameter, brought up to date by now


class Alike:
    """Ranks by kind: those of one kind do the same at the same times, so that one clock serves for them.
    ``kinds`` is what they are told apart by."""

    def __init__(self, kinds: Iterable[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        self.kind_of = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        firsts = [-1] * len(numbers)
        for rank, kind in enumerate(self.kind_of):
            if firsts[kind] < 0:
                firsts[kind] = rank
        self.firsts = tuple(firsts)  # by kind, its first rank
        self._kinds: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The kinds of some ranks."""
        if ranks not in self._kinds:
            self._kinds[ranks] = tuple(dict.fromkeys(self.kind_of[r] for r in ranks))
        return self._kinds[ranks]

    def ranks(self, kinds: Iterable[int]) -> tuple[int, ...]:
        wanted = set(kinds)
        return tuple(r for r, kind in enumerate(self.kind_of) if kind in wanted)


def membership(groups: Iterable[tuple[int, ...]], world_size: int) -> list[tuple[int, ...]]:
    """Per rank, which of some groups it is in."""
    found: list[list[int]] = [[] for _ in range(world_size)]
    for number, ranks in enumerate(groups):
        for r in ranks:
            found[r].append(number)
    return list(map(tuple, found))
