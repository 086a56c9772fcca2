"""Seconds of a piece of work on one device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from ...runtime.accelerator import synchronize
from ...runtime.streams import keep_busy, timed_moment

REPEATS = 3
ISSUE_MARGIN = 1.5  # of the seconds that issuing took before
LONG_S = 0.02  # longer work is measured once after its first run, as the clock is exact enough


class Meter:
    """Seconds of a piece of work on one device."""

    def __init__(self, device: torch.device, *, emulated: bool) -> None:
        self.device, self.emulated = device, emulated

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of ``work``: CPU time of the thread under a quota, wall-clock time otherwise."""
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
        clock; with something to do ``between`` runs, each run is timed separately."""
        first = self.once(work)
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

        runs = REPEATS if first < LONG_S else 1
        return statistics.median(self.once(repeated) for _ in range(runs)) / inner

    @staticmethod
    def wall(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started


class DeviceMeter(Meter):
    """Seconds for which an accelerator itself computes. Short kernels end before the host has issued the next
    one, so work is issued while the device is still busy with something else (``keep_busy``), and the time is
    taken by the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, emulated=False)

    def once(self, work: Callable[[], object]) -> float:
        synchronize(self.device)
        started = time.perf_counter()
        work()
        issued_s = time.perf_counter() - started
        synchronize(self.device)
        if issued_s < LONG_S:
            keep_busy(self.device, ISSUE_MARGIN * issued_s)
        begun = timed_moment(self.device)
        work()
        ended = timed_moment(self.device)
        synchronize(self.device)
        return begun.elapsed_time(ended) / 1e3
