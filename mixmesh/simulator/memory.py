"""The memory of a rank over a step: how many bytes it holds at the time of each event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..base.timeline import Timeline
from ..step.memory import BEFORE

Moments = Sequence[tuple[str, int]]  # (the name of an event, the bytes that are held then)


@dataclass(frozen=True)
class MemoryCourse:
    """The memory of one rank over time: the most bytes held before the first step, and ``points`` of
    (seconds, bytes) in the order of time. The bytes of a point are held until the next point."""

    before_bytes: int
    points: tuple[tuple[float, int], ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.before_bytes, *(size_bytes for _, size_bytes in self.points))


def memory_courses(held: Iterable[Moments], timeline: Timeline) -> tuple[MemoryCourse, ...]:
    """The memory of each rank over the step of ``timeline``, which must have events. ``held`` are the bytes
    of every moment (``Simulation.held_bytes``).

    All micro-batches are assumed to hold as much as the largest one.
    """
    starts_s: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in timeline.events:
        starts_s[event.rank][event.name].append(event.start_s)
    return tuple(course_of(moments, starts_s[rank]) for rank, moments in enumerate(held))


def course_of(moments: Moments, starts_s: dict[str, list[float]]) -> MemoryCourse:
    """The memory of a rank whose events start at these seconds, by name."""
    before_bytes = max((size_bytes for event, size_bytes in moments if event == BEFORE), default=0)
    most: dict[float, int] = {}
    inside = [moment for moment in moments if moment[0] != BEFORE]
    for number in range(max(map(len, starts_s.values()), default=1)):
        for time_s, size_bytes in points_of(inside, starts_s, number):
            most[time_s] = max(most.get(time_s, 0), size_bytes)
    return MemoryCourse(before_bytes, tuple(sorted(most.items())))


def points_of(moments: Moments, starts_s: dict[str, list[float]], number: int) -> Iterator[tuple[float, int]]:
    """Yields each moment's bytes with the time at which its event starts for the ``number``-th time. A moment
    without an event has the time of the one before it, or of the first one."""
    times_s = {event: starts[number] for event, starts in starts_s.items() if number < len(starts)}
    time_s = next((times_s[event] for event, _ in moments if event in times_s), 0.0)
    for event, size_bytes in moments:
        if event in times_s:
            time_s = times_s[event]
        elif event in starts_s:
            continue  # the event occurs fewer than ``number`` times
        yield time_s, size_bytes
