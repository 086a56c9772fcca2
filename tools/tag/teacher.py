"""Examples for TAG's policy to learn from: the best strategies that a long local search finds.

TAG learns from the visits of its own tree search. In a tree of forty groups, thousands of visits say
something of the first two or three; a strategy that was improved change by change says what all groups are
to be, so one search teaches as many decisions as there are groups.

A search for every ratio of the first choice, which stays: all groups begin as copies of the best choice of
that ratio, and are changed (``moves``) while that makes the step no slower. Many begin, and those that have
come far are searched on; last of all the best one, in which the first choice may change as well.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from mixmesh.search.evaluate import Actions, Evaluator, Outcome, placed_of
from mixmesh.search.learned.mcts import order_of_groups
from mixmesh.search.learned.moves import Moves
from mixmesh.search.learned.seeds import everywhere
from mixmesh.search.placement import Action

ROUNDS = ((14, 60), (4, 200), (1, 900))  # so many searches, each for so many tries more
FREE = 900  # tries of the last search
CLOSE = 1.01  # times the best one's seconds: as good, for teaching
PASSED = 1.002  # times as fast: a new state of the search, to learn from


@dataclass(frozen=True)
class Lesson:
    """After the first choice, strategies that are as good as the best one found, with their outcomes; and
    ``passed``, what the search came by on its way there."""

    first: Action
    best: tuple[tuple[Actions, Outcome], ...]  # the best one first
    passed: tuple[Actions, ...] = ()

    @property
    def outcome(self) -> Outcome:
        return self.best[0][1]


@dataclass
class _Search:
    strategy: Actions
    outcome: Outcome
    seen: dict = field(default_factory=dict)  # strategies that were close to the best when they were tried
    passed: list[Actions] = field(default_factory=list)
    passed_s: float = float("inf")


def lessons(evaluate: Evaluator, rng: random.Random, rounds=ROUNDS, free: int = FREE) -> list[Lesson]:
    """One for each search of the last round but one, and one for the last search, the best first."""
    space = evaluate.space
    first = order_of_groups(space)[0]
    moves = Moves(space, rng, first)
    by_ratio: dict = {}
    for action in space.actions(first):
        strategy = everywhere(space, action)
        made = _Search(strategy, evaluate(strategy))
        known = by_ratio.setdefault(action.placed.ratio, made)
        if made.outcome.key < known.outcome.key:
            by_ratio[action.placed.ratio] = made
    searches = list(by_ratio.values())
    taught = searches
    for count, tries in rounds:
        taught, searches = searches, sorted(searches, key=lambda s: s.outcome.key)[:count]
        for search in searches:
            _on(evaluate, moves, search, [s.strategy for s in searches], tries)
    best = searches[0]
    last = _Search(best.strategy, best.outcome)
    _on(evaluate, Moves(space, rng), last, [s.strategy for s in taught], free)
    found = (_lesson(search, first) for search in (*taught, last))
    return sorted(found, key=lambda lesson: lesson.outcome.key)


def _on(evaluate: Evaluator, moves: Moves, search: _Search, others: list[Actions], tries: int) -> None:
    for _ in range(tries):
        other = moves.drawn(search.strategy, others)
        outcome = evaluate(other)
        if outcome.key[0] <= search.outcome.key[0] and outcome.step_s <= search.outcome.step_s * CLOSE:
            search.seen[placed_of(other)] = other, outcome
        if outcome.key <= search.outcome.key:
            if outcome.step_s * PASSED < search.passed_s:
                search.passed.append(search.strategy)
                search.passed_s = outcome.step_s
            search.strategy, search.outcome = other, outcome


def _lesson(search: _Search, first: int) -> Lesson:
    """The search's best and what is as good, all with the same choice for the first group."""
    action, (excess, best_s) = search.strategy[first], search.outcome.key
    close = [
        (strategy, outcome)
        for strategy, outcome in search.seen.values()
        if strategy[first] == action and outcome.key[0] <= excess and outcome.step_s <= best_s * CLOSE
    ]
    close = close or [(search.strategy, search.outcome)]
    return Lesson(action, tuple(sorted(close, key=lambda s: s[1].key)), tuple(search.passed))
