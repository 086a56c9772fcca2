"""Detects a device that drifts: its own seconds, relative to the expected ones, for long enough."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sensitivity:
    """How much a device must drift, and for how long, before anything changes. A window has at least
    ``least_steps`` steps and lasts at least ``window_s``. A device drifts if in each of ``num_windows``
    windows its own time, relative to its expected one, is ``threshold`` times that of another device. After a
    move that reverses the last one, twice as many windows must agree, up to ``most_windows``; after ``calm``
    times as many windows without a move, half as many. A device that computes less than ``idle`` of a step is
    ignored."""

    threshold: float = 1.15
    least_steps: int = 5
    most_steps: int = 200
    window_s: float = 2.0
    num_windows: int = 4
    most_windows: int = 24
    calm: int = 10
    idle: float = 0.05


def window_steps(step_s: float, settings: Sensitivity) -> int:
    """The number of steps in a window if a step takes ``step_s``."""
    steps = math.ceil(settings.window_s / step_s) if step_s > 0 else settings.least_steps
    return max(settings.least_steps, min(steps, settings.most_steps))


@dataclass(frozen=True)
class Observed:
    """Everything that decides whether a device drifts. ``expected_s``: per rank, the expected own seconds of
    a step. ``windows``: the seconds measured per rank since shares were last considered, the newest window
    last. ``patience`` windows must agree; ``num_calm`` have passed without a move. ``last_move`` is the drift
    (``direction``) for which shares were last changed."""

    expected_s: tuple[float, ...]
    windows: tuple[tuple[float, ...], ...] = ()
    patience: int = 0
    num_calm: int = 0
    last_move: tuple[float, ...] = ()

    def add(self, own_s: Sequence[float], settings: Sensitivity) -> Observed:
        """The observation with one more window."""
        patience = self.patience or settings.num_windows
        num_calm = self.num_calm + 1
        if patience > settings.num_windows and num_calm >= settings.calm * patience:
            patience, num_calm = max(settings.num_windows, patience // 2), 0
        windows = (*self.windows, tuple(own_s))[-patience:]
        return replace(self, windows=windows, patience=patience, num_calm=num_calm)

    def watched(self, step_s: float, settings: Sensitivity) -> list[int]:
        """The ranks that compute for long enough to count: a part of the step, not counting the excess of a
        device that takes many times as long as expected."""
        longest_s = max(self.own_s())
        grown = max(1.0, longest_s / max(self.expected_s)) if max(self.expected_s) > 0 else 1.0
        least_s = settings.idle * step_s / grown
        return [r for r, s in enumerate(self.expected_s) if s > least_s and self._is_known(r)]

    def _is_known(self, rank: int) -> bool:
        return all(window[rank] > 0 for window in self.windows)

    def drifts(self, step_s: float, settings: Sensitivity) -> bool:
        """Whether, in every window that must agree, a rank has taken longer than another, relative to the
        expectations for both."""
        if len(self.windows) < (self.patience or settings.num_windows):
            return False
        ranks = self.watched(step_s, settings)
        factors = [[window[r] / self.expected_s[r] for r in ranks] for window in self.windows]
        limit = settings.threshold
        pairs = ((i, j) for i in range(len(ranks)) for j in range(len(ranks)) if i != j)
        return any(all(window[i] > limit * window[j] for window in factors) for i, j in pairs)

    def own_s(self) -> tuple[float, ...]:
        """For each rank, the median of the windows."""
        return tuple(map(statistics.median, zip(*self.windows)))

    def direction(self) -> tuple[float, ...]:
        """For each rank, the logarithm of its own time over the expected one, minus the mean of all; 0 for a
        rank that does not compute."""
        pairs = zip(self.own_s(), self.expected_s)
        logs = [math.log(own / expected) if own > 0 and expected > 0 else None for own, expected in pairs]
        computing = [x for x in logs if x is not None]
        mean = statistics.fmean(computing) if computing else 0.0
        return tuple(0.0 if x is None else x - mean for x in logs)

    def settled(self) -> Observed:
        """The observation after a decision to keep the shares: the measured times become the expected
        ones."""
        return replace(self, expected_s=self.own_s(), windows=())

    def moved(self, expected_s: Sequence[float], settings: Sensitivity) -> Observed:
        """The observation after a change of shares, with the new ``expected_s``."""
        direction, patience = self.direction(), self.patience or settings.num_windows
        if sum(a * b for a, b in zip(direction, self.last_move)) < 0:
            patience = min(2 * patience, settings.most_windows)
        return Observed(tuple(expected_s), (), patience, 0, direction)
