"""Memory over a step: the moments at which a rank holds something, each at the time of its event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..base.timeline import Timeline
from ..step.memory import BEFORE

Moments = Sequence[tuple[str, int]]  # the event that a moment belongs to, and bytes


@dataclass(frozen=True)
class MemoryCourse:
    """The memory of one rank: the most that it holds before the first step, and ``points`` of (seconds,
    bytes) in the order of time. A point holds until the next one."""

    before_bytes: int
    points: tuple[tuple[float, int], ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.before_bytes, *(size_bytes for _, size_bytes in self.points))


def memory_courses(held: Iterable[Moments], timeline: Timeline) -> tuple[MemoryCourse, ...]:
    """Per rank, its memory over the step of ``timeline``, which must have events. ``held`` are the bytes of
    every moment (``Simulation.held_bytes``).

    Micro-steps are taken to hold as much as the one that holds most.
    """
    starts_s: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in timeline.events:
        starts_s[event.rank][event.name].append(event.start_s)
    return tuple(course_of(moments, starts_s[rank]) for rank, moments in enumerate(held))


def course_of(moments: Moments, starts_s: dict[str, list[float]]) -> MemoryCourse:
    """The course of a rank whose events of each name start at these seconds."""
    before_bytes = max((size_bytes for event, size_bytes in moments if event == BEFORE), default=0)
    most: dict[float, int] = {}
    inside = [moment for moment in moments if moment[0] != BEFORE]
    for number in range(max(map(len, starts_s.values()), default=1)):
        for time_s, size_bytes in timed(inside, starts_s, number):
            most[time_s] = max(most.get(time_s, 0), size_bytes)
    return MemoryCourse(before_bytes, tuple(sorted(most.items())))


def timed(moments: Moments, starts_s: dict[str, list[float]], number: int) -> Iterator[tuple[float, int]]:
    """Moments at the time at which their event starts for the ``number``-th time. Those without an event go
    with the one before them, or with the first one."""
    times_s = {event: found[number] for event, found in starts_s.items() if number < len(found)}
    time_s = next((times_s[event] for event, _ in moments if event in times_s), 0.0)
    for event, size_bytes in moments:
        if event in times_s:
            time_s = times_s[event]
        elif event in starts_s:
            continue  # it happens less often
        yield time_s, size_bytes
