"""Bounded least squares: for linear functions, and for others by Gauss-Newton steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SWEEPS = 20_000
HALVINGS = 12  # most halvings of a step that leads away from the minimum
SETTLED = 1e-12  # relative to the largest figure
STEP = float(np.log(1.05))  # factor on an unknown, from which the slope is measured


def bounded_least_squares(
    matrix: np.ndarray, wanted: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """The x between ``low`` and ``high`` for which ``matrix @ x`` is nearest to ``wanted``. Coordinates are
    minimised in turn, which finds the minimum of a convex function over a box (Bertsekas, "Nonlinear
    Programming", 1999, section 2.7). Coordinates of zero columns are ``low``."""
    scale = np.sqrt((matrix**2).sum(axis=0))
    scale[scale == 0] = 1.0
    columns = matrix / scale
    gram, target = columns.T @ columns, columns.T @ wanted
    below, above = low * scale, high * scale
    x = np.clip(target, below, above)
    for _ in range(SWEEPS):
        before = x.copy()
        for n in range(len(x)):
            if gram[n, n] > 0:
                x[n] = np.clip(x[n] + (target[n] - gram[n] @ x) / gram[n, n], below[n], above[n])
            else:
                x[n] = below[n]
        if np.max(abs(x - before), initial=0.0) <= SETTLED * max(np.max(abs(x)), 1e-300):
            break
    return x / scale


def fit_logs(
    errors: Callable[[np.ndarray], np.ndarray],
    low: np.ndarray,
    high: np.ndarray,
    *,
    weight: float,
    steps: int,
) -> np.ndarray:
    """The logarithms of factors, between ``low`` and ``high``, that minimise the squared ``errors``, by
    Gauss-Newton steps from 0, each within the bounds. A step that makes the sum larger, as happens if a
    larger figure hides a smaller one, is halved until it does not: the result is never worse than 0.
    ``weight`` penalises the distance of each logarithm from 0, which decides if the errors hardly depend on a
    factor."""

    def total(at: np.ndarray, own: np.ndarray) -> float:
        return float(own @ own + weight**2 * (at @ at))

    logs = np.zeros_like(low)
    now = errors(logs)
    usual = weight * np.eye(len(logs))
    for _ in range(steps):
        slopes = [(errors(logs + STEP * unit) - now) / STEP for unit in np.eye(len(logs))]
        matrix = np.array(slopes).T
        wanted = np.concatenate([matrix @ logs - now, np.zeros(len(logs))])
        step = bounded_least_squares(np.vstack([matrix, usual]), wanted, low, high) - logs
        for _ in range(HALVINGS):
            after = errors(logs + step)
            if total(logs + step, after) < total(logs, now):
                break
            step = step / 2
        else:
            break
        logs, now = logs + step, after
    return logs
