"""Measures the seconds of a piece of work on one device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from ...runtime.accelerator import synchronize

REPEATS = 3
# Work that takes longer by the clock, with pauses of a quota, is measured once after its first run unless
# something comes between runs: that is exact enough, and a slow device has no time for more.
LONG_S = 0.02


class Meter:
    """Measures the seconds of a piece of work on one device."""

    def __init__(self, device: torch.device, *, emulated: bool) -> None:
        self.device, self.emulated = device, emulated

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of one run of ``work``: CPU time of the thread under a quota, wall-clock time otherwise."""
        synchronize(self.device)
        clock = time.thread_time if self.emulated else time.perf_counter
        started = clock()
        work()
        synchronize(self.device)
        return clock() - started

    def best(
        self,
        work: Callable[[], object],
        at_least_s: float = 2e-3,
        between: Callable[[], object] | None = None,
    ) -> float:
        """The median of a few runs after a first one. Short work is repeated until it is long enough for the
        clock; if something has to be done ``between`` runs, each run is timed separately."""
        started = time.perf_counter()
        first = self.once(work)
        is_long = time.perf_counter() - started >= LONG_S
        if between is not None:
            times = []
            for _ in range(REPEATS + 2):
                between()
                times.append(self.once(work))
            return statistics.median(times)
        inner = max(1, math.ceil(at_least_s / max(first, 1e-7))) if first < at_least_s else 1
        inner = min(inner, 50)

        def repeated():
            for _ in range(inner):
                work()

        runs = 1 if is_long else REPEATS
        return statistics.median(self.once(repeated) for _ in range(runs)) / inner

    @staticmethod
    def wall(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
