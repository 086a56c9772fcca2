"""Strategies that need no search, with all groups alike: data parallelism, and single devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..evaluate import Actions, Evaluator, Strategy, placed_of
from ..placement import Action, Placed, Space


def like(space: Space, k: int, action: Action) -> Action:
    """The choice for group ``k`` that is most similar to a choice for another group: its parameter server may
    be another rank, and a group without parameters synchronises nothing."""
    same = [a for a in space.actions(k) if a.device_groups == action.device_groups]
    if action.shares == "single":
        return next(a for a in same if a.placed == action.placed)
    same = [a for a in same if a.shares in (action.shares, "even")]  # equal shares appear as even ones
    return max(same, key=lambda a: (a.shares == action.shares, a.placed.sync == action.placed.sync))


def everywhere(space: Space, action: Action) -> Actions:
    return tuple(like(space, k, action) for k in range(len(space.groups)))


def data_parallel(space: Space) -> Iterator[Actions]:
    """Data parallelism on all devices, evenly and in proportion, with each way to synchronise: even AllReduce
    first."""
    most = max(range(len(space.groups)), key=lambda k: space.groups[k].param_bytes)
    for action in space.actions(most):
        if len(action.device_groups) == len(space.device_groups) and action.shares != "single":
            yield everywhere(space, action)


def singles(space: Space) -> Iterator[Actions]:
    for action in space.actions(0):
        if action.shares == "single":
            yield everywhere(space, action)


def best_alike(evaluate: Evaluator) -> Actions:
    """The best of the seeds in which all groups have the same choice."""
    space = evaluate.space
    return min((*data_parallel(space), *singles(space)), key=lambda strategy: evaluate(strategy).key)


def judged_seeds(
    evaluate: Evaluator, more: Iterable[Sequence[Action | Placed]] = ()
) -> tuple[list[Strategy], float]:
    """All seeds, including ``more``, and the step against which others are measured: that of the best one
    that fits, or of the best of all."""
    space = evaluate.space
    seeds: list[Sequence[Action | Placed]] = [*data_parallel(space), *singles(space), *more]
    outcomes = [evaluate(strategy) for strategy in seeds]
    placed = [placed_of(strategy) for strategy in seeds]
    return placed, min(outcomes, key=lambda o: o.key).step_s
