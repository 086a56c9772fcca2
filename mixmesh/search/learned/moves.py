"""Changes of a strategy: which groups change together, and to what.

While the step waits for the slowest rank, few changes of a single group have an effect. It helps to move a
run of neighbours, all equal groups (a layer of each block), or all groups with a similar ratio of parameters
to seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache

from ..evaluate import Actions
from ..placement import SYNCS, Action, Space
from .seeds import like

TOGETHER = {"run": 0.45, "one": 0.25, "heavy": 0.18, "equal": 0.12}
# probabilities of the kinds of changes; the rest changes only the way to synchronise
FROM_OTHERS, SAME, USED, ANY = 0.2, 0.28, 0.16, 0.2
EQUAL = 0.02  # relative difference up to which groups count as equal


class Moves:
    """Makes changes of strategies. ``first`` is a group whose ratio stays."""

    def __init__(self, space: Space, rng: random.Random, first: int | None = None) -> None:
        self.space, self.rng, self.first = space, rng, first
        groups, self.count = space.groups, len(space.groups)
        self.like = lru_cache(maxsize=None)(lambda k, action: like(space, k, action))
        self.any = space.actions(max(range(self.count), key=lambda k: groups[k].param_bytes))
        self.heavy = [g.param_bytes / max(max(g.seconds), 1e-12) for g in groups]
        self.equal = [[j for j, b in enumerate(groups) if _equal(a, b)] for a in groups]

    def together(self, k: int) -> Sequence[int]:
        """The groups that change together with ``k``."""
        how = self.rng.choices((*TOGETHER,), (*TOGETHER.values(),))[0]
        if how == "run":
            length = round(math.exp(self.rng.uniform(math.log(1.5), math.log(max(self.count, 2)))))
            start = k - self.rng.randrange(length)
            return range(max(start, 0), min(start + length, self.count))
        if how == "heavy" and self.heavy[k]:
            return [n for n, weight in enumerate(self.heavy) if weight >= self.heavy[k]]
        return self.equal[k] if how == "equal" else (k,)

    def drawn(self, strategy: Actions, others: Sequence[Actions]) -> Actions:
        """A random change: takes over a part of one of the ``others``, or makes one choice for several
        groups."""
        rng, k = self.rng, self.rng.randrange(self.count)
        which, how = self.together(k), self.rng.random()
        if how < FROM_OTHERS:
            other = rng.choice(others)
            return self.changed(strategy, {n: other[n] for n in which})
        how -= FROM_OTHERS
        if how < SAME:
            return self.to(strategy, which, rng.choice(strategy))
        if how < SAME + USED:
            return self.to(strategy, which, rng.choice(rng.choice(others)))
        if how < SAME + USED + ANY:
            return self.to(strategy, which, rng.choice(self.any))
        sync = rng.choice(SYNCS)
        return self.changed(strategy, {n: self.synchronised(n, strategy[n], sync) for n in which})

    def to(self, strategy: Actions, which: Sequence[int], action: Action) -> Actions:
        return self.changed(strategy, {n: self.like(n, action) for n in which})

    def changed(self, strategy: Actions, new: dict[int, Action]) -> Actions:
        out = list(strategy)
        for n, action in new.items():
            if n != self.first or action.placed.ratio == strategy[n].placed.ratio:
                out[n] = action
        return tuple(out)

    def synchronised(self, k: int, action: Action, sync: str) -> Action:
        """The choice with another way to synchronise, if it has one."""
        ratio = action.placed.ratio
        same = (a for a in self.space.actions(k) if a.placed.ratio == ratio and a.placed.sync == sync)
        return next(same, action)


def _equal(a, b) -> bool:
    pairs = ((a.param_bytes, b.param_bytes), (max(a.seconds), max(b.seconds)))
    return all(abs(x - y) <= EQUAL * max(x, y) for x, y in pairs)
