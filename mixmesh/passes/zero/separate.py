"""ZeRO stages 0 and 1: gradients meet once per step, so every device accumulates at its own pace.

With ``t_i(m)`` the seconds of a micro-batch on device i, its time for n samples is that of the best split

    f_i(n) = min over A, m, l of (A - 1) t_i(m) + t_i(l),   (A - 1) m + l = n,   1 <= l <= m <= limit_i

and the step is ``min over n_i, sum n_i = global_batch, of max_i f_i(n_i)``. Taking one sample out of the last
micro-batch shows that ``f_i`` never falls, so ``N_i(T)``, the most samples within T seconds, acts as its
inverse (``n <= N_i(T)`` exactly if ``f_i(n) <= T``), and the step is the smallest T with ``sum_i N_i(T) >=
global_batch``. That T is found by bisection, over all splits:

    N_i(T) = max over m of (k m + largest l with t_i(l) <= T - k t_i(m)),   k = floor(T / t_i(m))

Poplar (AAAI'25) gives shares in proportion to peak speed and hands the rest to the device that ends first;
that is not optimal if curves bend or have steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .curves import Tables
from .shares import share_out

# within this tolerance times count as equal and the bisection ends: a few hundred roundings of a sum
TOLERANCE = 1e-12
SLACK = 1 + TOLERANCE


def split_separately(tables: Tables, global_batch: int) -> list[tuple[int, int, int]]:
    """``(micro_batch, accumulation_steps, last_micro_batch)`` per device, for the shortest step."""
    most = _capacities(tables, global_batch)
    shares = share_out(global_batch, [most[k] for k in tables.kind])
    split_of = {case: best_split(tables.distinct[case[0]], case[1]) for case in set(zip(tables.kind, shares))}
    return [split_of[case] for case in zip(tables.kind, shares)]


def best_split(t: np.ndarray, num_samples: int) -> tuple[int, int, int]:
    """The fastest ``(micro_batch, accumulation_steps, last_micro_batch)`` for a device's own samples.

    Among equally fast ones, takes the one with the fewest steps, then the most even one.
    """
    if num_samples == 0:
        return 0, 0, 0
    sizes = np.arange(1, len(t))
    steps = -(-num_samples // sizes)
    last = num_samples - (steps - 1) * sizes
    seconds = (steps - 1) * t[sizes] + t[last]
    fastest = np.flatnonzero(seconds <= seconds.min() * SLACK)
    # a larger micro-batch takes no more steps; among those with the same number of steps the smallest is the
    # most even
    fewest = fastest[steps[fastest] == steps[fastest[-1]]]
    return int(sizes[fewest[0]]), int(steps[fewest[0]]), int(last[fewest[0]])


def _capacities(tables: Tables, global_batch: int) -> list[int]:
    """``N_i(T)`` of every kind at the smallest T for which they add up to the batch.

    Kept per kind: ``low``, the samples within a time that is too short, and for every micro-batch size that
    can still do better, the samples within a time that is long enough. Sizes drop out as the two times
    converge; a kind without remaining sizes has its answer.
    """
    kinds, counts = tables.distinct, tables.num_devices
    good = [_good_sizes(t) for t in kinds]
    too_short, enough = _bracket(tables, good, global_batch)
    low = [int(_most(t, too_short, s).max()) for t, s in zip(kinds, good)]
    sizes = [np.arange(1, _largest(t, enough * SLACK) + 1) for t in kinds]
    high = [_most(t, enough, s) for t, s in zip(kinds, sizes)]
    while True:
        useful = [h > n for h, n in zip(high, low)]
        sizes = [s[u] for s, u in zip(sizes, useful)]
        high = [h[u] for h, u in zip(high, useful)]
        middle = (too_short + enough) / 2
        if enough <= too_short * SLACK or not too_short < middle < enough:
            return [int(h.max(initial=n)) for h, n in zip(high, low)]
        now = [_most(t, middle, s) for t, s in zip(kinds, sizes)]
        best = [int(x.max(initial=n)) for x, n in zip(now, low)]
        if sum(c * n for c, n in zip(counts, best)) >= global_batch:
            enough, high = middle, now
        else:
            too_short, low = middle, best


def _most(t: np.ndarray, seconds: float, sizes: np.ndarray) -> np.ndarray:
    """For each micro-batch size, the most samples within the time: full micro-batches and a last one."""
    budget = seconds * SLACK
    full = np.floor(budget / t[sizes])
    rest = np.maximum(budget - full * t[sizes], 0.0)
    last = np.searchsorted(t, rest, side="right") - 1
    return full.astype(np.int64) * sizes + np.minimum(last, sizes)


def _largest(t: np.ndarray, seconds: float) -> int:
    """The largest micro-batch within the time."""
    return int(np.searchsorted(t, seconds, side="right")) - 1


def _good_sizes(t: np.ndarray) -> np.ndarray:
    """The size of the highest rate and the limit: one is near the best for many samples, the other,
    whose last micro-batch may be any, for few."""
    return np.array([1 + (np.arange(1, len(t)) / t[1:]).argmax(), len(t) - 1])


def _bracket(tables: Tables, good: list[np.ndarray], global_batch: int) -> tuple[float, float]:
    """Seconds too short for the batch, and seconds long enough for it, close together.

    No device beats its best rate, so ``global_batch / sum of rates`` is a lower bound; whole micro-batches of
    the best rate's size miss that by less than one each, which gives an upper bound. Between the two, cheap
    bounds of ``N_i(T)`` are bisected: from ``_good_sizes`` alone, and T times the best rate among
    micro-batches that end within T.
    """
    kinds, counts = tables.distinct, tables.num_devices
    rates = [np.maximum.accumulate(np.append(0.0, np.arange(1, len(t)) / t[1:])) for t in kinds]
    rate = sum(c * float(r[-1]) for c, r in zip(counts, rates))
    spare = sum(c * int(s[0]) for c, s in zip(counts, good))

    def surely_done(seconds: float) -> bool:
        most = [int(_most(t, seconds, s).max()) for t, s in zip(kinds, good)]
        return sum(c * n for c, n in zip(counts, most)) >= global_batch

    def perhaps_done(seconds: float) -> bool:
        best = [float(r[_largest(t, seconds)]) for t, r in zip(kinds, rates)]
        return seconds * sum(c * r for c, r in zip(counts, best)) >= global_batch

    lower, upper = global_batch / rate, (global_batch + spare) / rate
    enough = _bisect(surely_done, lower, upper)[1]
    too_short = _bisect(perhaps_done, lower, enough)[0]
    return too_short * (1 - 1e-9), enough * (1 + 1e-9)


def _bisect(done: Callable[[float], bool], too_short: float, enough: float) -> tuple[float, float]:
    """The two times, narrowed down by bisection to a thousandth around the first one that is ``done``."""
    while enough > too_short * 1.001:
        middle = (too_short + enough) / 2
        too_short, enough = (too_short, middle) if done(middle) else (middle, enough)
    return too_short, enough
