"""Measures how far ahead of its usual pace a device gets after a rest.

A device that has waited for others may compute faster for a while: a processor under a CPU quota has all of
its quota left, a cool one has a higher clock, a shared one has saved up credit. In a step, a device rests at
every collective that it waits for, so its speed between two collectives differs from its continuous speed,
with which operators are measured.

Work is counted against the time since the rest ended. The lead is the work done, in seconds of the usual
pace, minus that time. Its maximum is the work that the device has saved up, and its initial growth gives the
device's speed until that is used up. All ranks rest and start together, as after a collective.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import torch

from ...runtime.messages import meet
from .limit import REST, Limit
from .overlap import piece_of_work

REST_S = 0.03  # a lead is as large after longer rests
MOST_REST = 1.4  # longest rest over the shortest: rounds must not start in step with a quota's periods
WATCHED_S = 0.14  # seconds watched after a rest
SETTLED = 0.3  # share of these seconds after which the device is at its usual pace
ROUNDS, LEAST_ROUNDS = 20, 5
STEPS = 280  # steps that are watched
NOISE = 1.1  # a device that is no faster than this after a rest counts as one that does not profit from it


def measure_rest(device: torch.device, limit: Limit | None = None) -> tuple[float, float]:
    """``rested_s`` and ``rested_speed`` of ``DeviceProfile``, from as many rounds as ``limit`` has time for;
    with too few rounds, the values of a device that does not profit from a rest. Collective."""
    unit = piece_of_work(device)
    unit()
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        if limit is not None and limit.is_past(REST):
            break
        meet()
        time.sleep(random.uniform(1.0, MOST_REST) * REST_S)
        rounds.append(times_of(unit, WATCHED_S))
    return rested(rounds) if len(rounds) >= LEAST_ROUNDS else (0.0, 1.0)


def times_of(unit: Callable[[], object], seconds: float) -> list[float]:
    """The time, since the start, at which each unit of work was done."""
    started, times = time.perf_counter(), [0.0]
    while times[-1] < seconds:
        unit()
        times.append(time.perf_counter() - started)
    return times[1:]


def rested(rounds: list[list[float]]) -> tuple[float, float]:
    """The lead in seconds, and the speed, relative to the usual one, at which its first half is gained.

    The mean of the rounds counts, because a quota comes in periods. The line through the work done once the
    lead is used up is the usual pace; the lead is the time before the start at which that line reaches zero
    work.
    """
    grid = np.linspace(0.0, WATCHED_S, STEPS + 1)[1:]
    mean_counts = np.mean([np.searchsorted(times, grid, side="right") for times in rounds], axis=0)
    late = grid >= SETTLED * WATCHED_S
    per_second, first = np.polyfit(grid[late], mean_counts[late], 1)
    if per_second <= 0 or first <= 0:
        return 0.0, 1.0
    lead_s = first / per_second
    leads = mean_counts / per_second - grid
    half = int(np.argmax(leads >= lead_s / 2))
    speed = 1 + leads[half] / grid[half]
    return (float(lead_s), float(speed)) if speed > NOISE else (0.0, 1.0)
