"""Strategies that need no search: data parallelism, single devices, layers one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..placement import Action, Space
from .evaluate import Actions, Evaluator


def like(space: Space, k: int, action: Action) -> Action:
    """The choice for group ``k`` that is most like that for another one: its parameter server may be another
    rank, and a group without parameters synchronises nothing."""
    same = [a for a in space.actions(k) if a.device_groups == action.device_groups]
    if action.shares == "single":
        return next(a for a in same if a.placed == action.placed)
    same = [a for a in same if a.shares in (action.shares, "even")]  # equal shares appear as even ones
    return max(same, key=lambda a: (a.shares == action.shares, a.placed.sync == action.placed.sync))


def everywhere(space: Space, action: Action) -> Actions:
    return tuple(like(space, k, action) for k in range(len(space.groups)))


def data_parallel(space: Space) -> Iterator[Actions]:
    """All devices, evenly and in proportion, with each way to synchronise."""
    most = max(range(len(space.groups)), key=lambda k: space.groups[k].param_bytes)
    for action in space.actions(most):
        if len(action.device_groups) == len(space.device_groups) and action.shares != "single":
            yield everywhere(space, action)


def singles(space: Space) -> list[Action]:
    """Single devices, by rank."""
    found = [a for a in space.actions(0) if a.shares == "single"]
    return sorted(found, key=lambda a: a.placed.ratio.index(1.0))


def contiguous(space: Space, devices: Sequence[Action]) -> Actions:
    """Groups in their order on one device after another, each with work in proportion to its speed."""
    class_of = space.costs.class_of
    ranks = [a.placed.ratio.index(1.0) for a in devices]
    speed = [space.proportional[r] for r in ranks]
    total = sum(g.seconds[class_of[ranks[0]]] for g in space.groups)
    chosen, done, n = [], 0.0, 0
    for g in space.groups:
        half = g.seconds[class_of[ranks[0]]] / 2
        while n + 1 < len(ranks) and done + half > total * sum(speed[: n + 1]) / sum(speed):
            n += 1
        chosen.append(devices[n])
        done += 2 * half
    return tuple(chosen)


def seeds(space: Space) -> Iterator[Actions]:
    """What HeteroG's pool of elites begins with, and every single device."""
    yield from data_parallel(space)
    devices = singles(space)
    for action in devices:
        yield everywhere(space, action)
    if len(devices) > 1:
        fastest_first = sorted(devices, key=lambda a: -max(space.proportional[r] for r in _ranks(a)))
        for count in {2, len(devices)}:
            yield contiguous(space, fastest_first[:count])
        yield tuple(devices[k % len(devices)] for k in range(len(space.groups)))


def judged_seeds(evaluate: Evaluator) -> tuple[list[Actions], float]:
    """The seeds, and the step that others are measured by: the best of those that fit, or of all."""
    made = list(seeds(evaluate.space))
    outcomes = [evaluate(actions) for actions in made]
    return made, min(outcomes, key=lambda o: o.key).step_s


def _ranks(action: Action) -> tuple[int, ...]:
    return tuple(r for r, share in enumerate(action.placed.ratio) if share)
