"""The number of strategies that a search has to ask for: medians over seeds, and one search against another.

One seed says little: if one choice in twenty is better than all seeds, an uninformed search is often lucky at
once. A search that never gets there counts with its whole budget.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BETTER = 1.01  # speedup over the best seed that counts as found
EQUAL = 1.0001  # slowdown that counts as equal

Trace = tuple[tuple[int, float], ...]  # (calls, estimated seconds of the best that fits), at each improvement


def calls_until(trace: Trace, step_s: float) -> int | None:
    return next((calls for calls, seconds in trace if seconds <= step_s), None)


def better_after(traces: Sequence[Trace], base_s: float) -> tuple[int | None, ...]:
    """The calls until a step was ``BETTER`` than ``base_s``, by seed; None if never."""
    return tuple(calls_until(trace, base_s / BETTER) for trace in traces)


def level_after(traces: Sequence[Trace], level_s: float | None) -> tuple[int | None, ...]:
    """The calls until a step was as good as ``level_s``, by seed; empty without a level."""
    return () if level_s is None else tuple(calls_until(trace, level_s * EQUAL) for trace in traces)


def level_of(traces: Sequence[Trace], base_s: float) -> float | None:
    """The median over seeds of a search's final step; None if that is not ``BETTER`` than ``base_s``."""
    level_s = statistics.median([trace[-1][1] if trace else base_s for trace in traces])
    return level_s if level_s <= base_s / BETTER else None


def median(calls: Sequence[int | None], budget: int) -> int | None:
    """The median number of calls over seeds; None if half of the seeds or more never get there."""
    if not calls:
        return None
    middle = statistics.median([math.inf if n is None else n for n in calls])
    return None if math.isinf(middle) else max(1, min(round(middle), budget))


@dataclass(frozen=True)
class Race:
    """One search against another over cases: ``ratio`` is the geometric mean of the ratios of median calls,
    ``halved`` the number of cases in which that ratio was at most a half."""

    cases: int
    ratio: float | None
    halved: int


def race(pairs: Sequence[tuple[int | None, int | None, int]]) -> Race:
    """Compares two searches by their median calls in each case, given both and the budget. Cases in which
    neither gets there do not count."""
    ratios = [(a or budget) / (b or budget) for a, b, budget in pairs if a or b]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    return Race(len(ratios), mean, sum(r <= 0.5 for r in ratios))
