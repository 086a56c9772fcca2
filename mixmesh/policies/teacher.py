"""What TAG's policy learns from: the best strategies that a long local search finds.

TAG learns from the visits of its own tree search. In a tree of forty groups, thousands of visits say
something of the first two or three; a strategy that was improved change by change says what all groups are
to be, so one search teaches as many decisions as there are groups.

Of every first choice that is worth it, one search: that choice stays, all groups begin as copies of it, and
runs of neighbours, of all with as many parameters to their seconds, or of one alone are changed, while that
makes the step faster.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from ..placement import Action
from .evaluate import Actions, Evaluator, Outcome, placed_of
from .mcts import order_of_groups
from .seeds import everywhere, like

STARTS = 5  # first choices that are searched from
TRIES = 1500  # strategies of each search
LONGEST = 12  # neighbours that change together
CLOSE = 1.01  # of the best one's seconds: as good, for what is taught


@dataclass(frozen=True)
class Lesson:
    """After the first choice, strategies that are as good as the best one found, with their outcomes."""

    first: Action
    best: tuple[tuple[Actions, Outcome], ...]  # the best one first

    @property
    def outcome(self) -> Outcome:
        return self.best[0][1]


def lessons(
    evaluate: Evaluator, rng: random.Random, starts: int = STARTS, tries: int = TRIES
) -> list[Lesson]:
    """One for each first choice that was searched from, the best first."""
    space = evaluate.space
    first = order_of_groups(space)[0]
    alike = sorted((evaluate(everywhere(space, a)).key, n) for n, a in enumerate(space.actions(first)))
    ranked = [space.actions(first)[n] for _, n in alike]
    chosen: dict = {}  # of those that run on the same devices with the same shares, the best
    for action in ranked:
        chosen.setdefault(action.placed.ratio, action)
    teacher = _Teacher(evaluate, rng, first)
    found = [teacher.lesson(action, tries) for action in list(chosen.values())[:starts]]
    return sorted(found, key=lambda lesson: lesson.outcome.key)


class _Teacher:
    def __init__(self, evaluate: Evaluator, rng: random.Random, first: int) -> None:
        self.evaluate, self.space, self.rng, self.first = evaluate, evaluate.space, rng, first
        self.like = lru_cache(maxsize=None)(lambda k, action: like(self.space, k, action))
        groups = self.space.groups
        self.most = max(range(len(groups)), key=lambda k: groups[k].param_bytes)
        self.weight = [g.param_bytes / max(max(g.seconds), 1e-12) for g in groups]

    def lesson(self, first: Action, tries: int) -> Lesson:
        best = everywhere(self.space, first)
        best_outcome = self.evaluate(best)
        seen = {placed_of(best): (best, best_outcome)}
        for _ in range(tries):
            other = self.changed(best)
            outcome = self.evaluate(other)
            seen[placed_of(other)] = other, outcome
            if outcome.key < best_outcome.key:
                best, best_outcome = other, outcome
        key = best_outcome.key
        close = [s for s in seen.values() if s[1].key[0] <= key[0] and s[1].step_s <= key[1] * CLOSE]
        return Lesson(first, tuple(sorted(close, key=lambda s: s[1].key)))

    def changed(self, strategy: Actions) -> Actions:
        rng = self.rng
        k = rng.randrange(len(strategy))
        drawn = rng.random()
        if drawn < 0.4:
            which = range(k, min(len(strategy), k + rng.randint(1, LONGEST)))
        elif drawn < 0.6:
            which = [n for n, weight in enumerate(self.weight) if weight >= self.weight[k] > 0]
        else:
            which = [k]
        new = rng.choice((rng.choice(strategy), rng.choice(self.space.actions(self.most))))
        out = list(strategy)
        for n in which:
            if n != self.first:
                out[n] = self.like(n, new)
        return tuple(out)
