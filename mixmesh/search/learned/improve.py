"""Changes the best strategy of a tree search, mostly in the ways that a policy suggests.

A tree decides group by group, the most expensive first, and reaches the weak points of a nearly good strategy
late. So the best strategy is also changed directly, between playouts. The policy is asked for the choices of
all groups; groups for which it would choose something else are changed first, to its likely choices, and
other changes are random (``moves``).

A policy judges each group separately, and errs if groups must agree: half of them here and half there may be
worse than either. So the ratio that the policy prefers overall is judged first, for all groups. A strategy
may also be better than all that differ in a few groups, but worse than one that differs in all: after each
advice, all groups of a ratio change their way of synchronising together, for each ratio and each way.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from ...lang.ir import Ratio
from ..evaluate import Actions, Outcome
from ..placement import SYNCS, Action, Space
from .moves import Moves

ADVISED = 0.6  # share of the changes that follow advice; the others are random
ANYWHERE = 0.05  # probability of changing a group that the policy would leave unchanged
MOST_OTHERS = 6  # number of other strategies from which parts are taken
ASKED_AGAIN = 1.003  # speedup after which the policy is asked again


class Improvement:
    """Improves ``best``, the current strategy; ``ask`` returns the policy's advice for one, or None if it has
    no more."""

    def __init__(
        self,
        space: Space,
        judge: Callable[[Actions], Outcome],
        ask: Callable[[Actions, Outcome], tuple[np.ndarray, ...] | None],
        start: Actions,
        seed: int,
    ) -> None:
        self.space, self.judge, self.ask = space, judge, ask
        self.rng = random.Random(seed)
        self.moves = Moves(space, self.rng)
        self.best, self.outcome = start, judge(start)
        self.others: list[Actions] = [start]
        self._choices = [space.actions(k) for k in range(len(space.groups))]
        self._numbers = [{a: n for n, a in enumerate(mine)} for mine in self._choices]
        self._advice: tuple[np.ndarray, ...] | None = None
        self._asked_s = float("inf")
        self._in_turn: list[tuple[Ratio, str]] = []

    def offer(self, strategy: Actions, outcome: Outcome) -> None:
        """Takes over a strategy that was found elsewhere, if it is better."""
        if outcome.key < self.outcome.key:
            self._remember(self.best)
            self.best, self.outcome = strategy, outcome

    def advised(self) -> Outcome | None:
        """Judges the strategies that the policy would make of the best one, with one ratio for all groups and
        with each group's own. Returns the last outcome, None if neither is new."""
        self._asked_s = self.outcome.step_s
        advice = self.ask(self.best, self.outcome)
        if advice is None:
            return None
        self._advice, outcome = advice, None
        each = tuple(mine[int(p.argmax())] for mine, p in zip(self._choices, advice))
        for strategy in dict.fromkeys((of_one_ratio(self.space, advice), each)):
            if strategy != self.best and strategy not in self.others:
                self._remember(strategy)
                outcome = self._tried(strategy)
        self._in_turn = self._ways()
        return outcome

    def step(self) -> None:
        """Makes one change, and keeps it if the step is no slower."""
        if self.outcome.step_s * ASKED_AGAIN <= self._asked_s and self.advised():
            return
        if self._in_turn:
            self._tried(self._synchronised(*self._in_turn.pop(0)))
            return
        advice = self._advice
        if advice is not None and self.rng.random() < ADVISED:
            self._tried(self._as_advised(advice))
        else:
            self._tried(self.moves.drawn(self.best, self.others))

    def _ways(self) -> list[tuple[Ratio, str]]:
        """Yields each ratio of the best strategy with each way to synchronise, the ratio with the most
        parameters first."""
        params: Counter[Ratio] = Counter()
        for group, action in zip(self.space.groups, self.best):
            params[action.placed.ratio] += group.param_bytes
        return [(ratio, sync) for ratio, size in params.most_common() if size for sync in SYNCS]

    def _synchronised(self, ratio: Ratio, sync: str) -> Actions:
        which = (k for k, a in enumerate(self.best) if a.placed.ratio == ratio)
        new = {k: self.moves.synchronised(k, self.best[k], sync) for k in which}
        return self.moves.changed(self.best, new)

    def _tried(self, strategy: Actions) -> Outcome:
        outcome = self.judge(strategy)
        if outcome.key <= self.outcome.key:
            self.best, self.outcome = strategy, outcome
        return outcome

    def _as_advised(self, advice: Sequence[np.ndarray]) -> Actions:
        here = [numbers[a] for numbers, a in zip(self._numbers, self.best)]
        differs = [1 - float(p[n]) + ANYWHERE for p, n in zip(advice, here)]
        k = self.rng.choices(range(len(here)), differs)[0]
        weights = advice[k].astype(float) + ANYWHERE / len(advice[k])
        weights[here[k]] = 0.0
        if not weights.any():
            return self.moves.drawn(self.best, self.others)
        action: Action = self.rng.choices(self._choices[k], weights.tolist())[0]
        return self.moves.to(self.best, self.moves.together(k), action)

    def _remember(self, strategy: Actions) -> None:
        if strategy not in self.others:
            self.others = [*self.others, strategy][-MOST_OTHERS:]


def of_one_ratio(space: Space, advice: Sequence[np.ndarray]) -> Actions:
    """The strategy with all groups at the ratio that is likeliest overall, weighted by their seconds, and
    with the likeliest way to synchronise for each."""
    chances: defaultdict[Ratio, float] = defaultdict(float)
    for k, (group, p) in enumerate(zip(space.groups, advice)):
        for action, chance in zip(space.actions(k), p):
            chances[action.placed.ratio] += max(group.seconds) * float(chance)
    ratio = max(chances, key=chances.__getitem__)
    out: list[Action] = []
    for k, p in enumerate(advice):
        choices = space.actions(k)
        here = [n for n, action in enumerate(choices) if action.placed.ratio == ratio]
        out.append(choices[max(here, key=lambda n: p[n])])
    return tuple(out)
