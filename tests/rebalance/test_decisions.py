"""Decisions under noise: recorded on a machine under load, in bursts, periodic, and speeds that do change."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mixmesh.training.rebalance import Observed, Sensitivity, Terms, decide, window_steps

RECORDED = Path(__file__).with_name("recorded_noise.json")  # by record_noise.py
LEAST_GAIN, PAUSE_S, STEPS = 0.05, 1.0, 600
SETTINGS = Sensitivity()
SPEEDS = (4.0, 2.0, 2.0, 1.0)  # shares of the batch per second
Slowness = Callable[[int, int], float]  # of a rank at a step


@dataclass
class Run:
    """A run that follows the devices, and one that does not."""

    moves: list[int]
    total_s: float
    plain_s: float
    shares: list[float]


def proportional(slowness: list[float]) -> list[float]:
    speeds = [speed / slow for speed, slow in zip(SPEEDS, slowness)]
    return [s / sum(speeds) for s in speeds]


def run(
    slowness: Slowness, steps: int = STEPS, settings: Sensitivity = SETTINGS, batch_shares: float = 1.0
) -> Run:
    """Data parallelism whose devices take ``slowness`` as long as planned for a batch of some size."""
    ranks = range(len(SPEEDS))
    planned = shares = proportional([1.0] * len(SPEEDS))
    observed = Observed(tuple(batch_shares * share / speed for share, speed in zip(shares, SPEEDS)))
    window: list[list[float]] = []
    length, done = settings.least_steps, Run([], 0.0, 0.0, shares)
    for step in range(steps):
        slow = [slowness(rank, step) for rank in ranks]
        own_s = [batch_shares * share * f / speed for share, f, speed in zip(shares, slow, SPEEDS)]
        done.total_s += max(own_s)
        done.plain_s += batch_shares * max(share * f / v for share, f, v in zip(planned, slow, SPEEDS))
        window.append(own_s)
        if len(window) < length:
            continue
        medians, step_s = [statistics.median(c) for c in zip(*window)], statistics.median(map(max, window))
        window, length = [], window_steps(step_s, settings)
        observed = observed.add(medians, settings)
        if not observed.drifts(step_s, settings):
            continue
        factors = [
            own * v / (share * batch_shares) for own, v, share in zip(observed.own_s(), SPEEDS, shares)
        ]
        new = proportional(factors)
        expected = [batch_shares * share * f / speed for share, f, speed in zip(new, factors, SPEEDS)]
        terms = Terms(
            step, 0, tuple(factors), tuple(shares), tuple(new), step_s, max(expected), steps - step, PAUSE_S
        )
        if decide(terms, LEAST_GAIN).is_applied:
            observed, shares = observed.moved(expected, settings), new
            done.moves.append(step)
            done.total_s += PAUSE_S
        else:
            observed = observed.settled()
    done.shares = shares
    return done


def recorded() -> list[list[float]]:
    """Per step, the own time of each rank over its median, as recorded."""
    rows = json.loads(RECORDED.read_text())["own_s"]
    middle = [statistics.median(column) for column in zip(*rows)]
    return [[own / m for own, m in zip(row, middle)] for row in rows]


def test_recorded_noise_moves_little():
    """Four processes on two cores, beside others: a device is slower than another for tens of steps, and
    following that costs no more than it gains."""
    rows = recorded()
    assert len(rows) >= 300 and max(max(row) for row in rows) > 1.3  # there is noise in it
    done = run(lambda rank, step: rows[step % len(rows)][rank], 3 * len(rows))
    assert len(done.moves) <= 2
    assert done.total_s < 1.05 * done.plain_s


def test_noise_would_move_shares_without_patience():
    """The windows that must agree are what keeps shares still."""
    rows = recorded()
    hasty = replace(SETTINGS, num_windows=1, most_windows=1, most_steps=5)
    assert len(run(lambda rank, step: rows[step % len(rows)][rank], settings=hasty).moves) > 10


@pytest.mark.parametrize("seed", range(5))
def test_bursts_move_nothing(seed):
    """A device takes three times as long for some steps, again and again."""
    dice = random.Random(seed)
    busy = {
        (dice.randrange(4), start + n) for start in range(0, STEPS, 40) for n in range(dice.randint(2, 9))
    }
    assert run(lambda rank, step: 3.0 if (rank, step) in busy else 1.0).moves == []


@pytest.mark.parametrize("period", [8, 30, 60, 100, 200])
def test_periodic_noise_does_not_swing_shares(period):
    """Half of the time a device takes half as long again: at most a few moves, then none."""
    done = run(lambda rank, step: 1.5 if rank == 1 and step % period < period / 2 else 1.0, 3000)
    assert len(done.moves) <= 8
    assert sum(step > 1500 for step in done.moves) <= 4
    assert done.total_s < 1.05 * done.plain_s


def test_a_slow_trend_is_followed_in_few_moves():
    done = run(lambda rank, step: 1.0 + min(step, 500) / 500 if rank == 0 else 1.0, 1000)
    assert 2 <= len(done.moves) <= 6
    assert done.total_s < 0.9 * done.plain_s
    assert done.shares == pytest.approx(proportional([2.0, 1.0, 1.0, 1.0]), abs=0.03)


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize(
    ("batch_shares", "most_steps"), [(1.0, 100), (50.0, 30)]
)  # steps of 0.11 s and 5.5 s
def test_a_changed_speed_is_one_move_soon(factor, batch_shares, most_steps):
    """Steps of 0.11 s and of 5.5 s: within thirty steps or about ten seconds, whichever is longer."""
    dice = random.Random(7)

    def slowness(rank: int, step: int) -> float:
        return dice.lognormvariate(0, 0.1) * (factor if rank == 2 and step >= 203 else 1.0)

    done = run(slowness, batch_shares=batch_shares)
    assert len(done.moves) == 1 and 203 <= done.moves[0] < 203 + most_steps
    assert done.shares == pytest.approx(proportional([1.0, 1.0, factor, 1.0]), rel=0.1)


def test_all_devices_alike_slower_is_no_drift():
    assert run(lambda rank, step: 1.8 if step > 100 else 1.0).moves == []


def test_a_change_that_is_taken_back_is_followed_twice():
    done = run(lambda rank, step: 2.0 if rank == 0 and 100 <= step < 300 else 1.0)
    assert len(done.moves) == 2 and done.total_s < done.plain_s
    assert done.shares == pytest.approx(proportional([1.0] * 4), abs=0.02)


TERMS = Terms(120, 20, (1.9, 1.0, 1.0), (0.5, 0.3, 0.2), (0.35, 0.39, 0.26), 0.21, 0.16, 880, 0.4)


def test_a_decision_says_its_numbers():
    text = decide(TERMS, LEAST_GAIN).text()
    assert text == (
        "step 120: compared with the others, device 0 takes 1.90x as long as planned for 20 steps; "
        "shares 50/30/20 -> 35/39/26 %, step 210 ms -> 160 ms predicted, "
        "880 steps left, pause 400 ms: applied"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"new_step_s": 0.205}, "gains less than 5%"),
        ({"steps_left": 7}, "do not pay for the pause"),
        ({"problem": "it is a pipeline"}, "it is a pipeline"),
    ],
)
def test_shares_stay_where_a_change_does_not_pay(changes, reason):
    decision = decide(replace(TERMS, **changes), LEAST_GAIN)
    assert not decision.is_applied and reason in decision.text()


@pytest.mark.parametrize("factor", [3.0, 40.0])
def test_a_device_that_stands_almost_still_drifts(factor):
    observed = Observed((0.1, 0.1))
    for _ in range(SETTINGS.num_windows):
        observed = observed.add((0.1, factor * 0.1), SETTINGS)
    assert observed.drifts(factor * 0.1 + 0.02, SETTINGS)


def test_a_device_that_hardly_computes_says_nothing():
    observed = Observed((0.2, 0.001))
    for _ in range(SETTINGS.num_windows):
        observed = observed.add((0.2, 0.005), SETTINGS)
    assert not observed.drifts(0.2, SETTINGS)
