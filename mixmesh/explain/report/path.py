"""The critical path of a timeline: the chain of events, each of which begins when the one before it ends."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ...base.timeline import Event

SAME_S = 1e-9  # moments closer than this count as one


def critical_path(events: Sequence[Event]) -> list[int]:
    """The indices of the events that the last one waits for, in order. If several end when one begins, the
    one on its own rank comes first, then the longest. The chain stops at an event before which nothing
    ends."""
    if not events:
        return []
    by_end = sorted(range(len(events)), key=lambda i: events[i].end_s)
    ends = [events[i].end_s for i in by_end]
    at = by_end[-1]
    path = [at]
    while True:
        event = events[at]
        near = range(bisect_left(ends, event.start_s - SAME_S), bisect_right(ends, event.start_s + SAME_S))
        before = [by_end[n] for n in near if events[by_end[n]].start_s < event.start_s - SAME_S]
        if not before:
            return path[::-1]
        at = max(before, key=lambda i: (events[i].rank == event.rank, events[i].end_s - events[i].start_s))
        path.append(at)
