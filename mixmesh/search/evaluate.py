"""Evaluates strategies for all searches: each once, at the fidelity that the search requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..base.lazy import lazy
from ..cost.levels import best_levels
from ..lang.ir import Levels
from ..lang.optimizer_states import OptimizerStates
from ..simulator import Timeline, simulate
from .placement import Action, Estimate, Estimator, Placed, Space
from .ratios import usable_bytes

EXCESS = 10.0  # penalty for lacking memory: a tenth of the memory doubles the cost

Actions = tuple[Action, ...]  # one for each group, in the order of the groups
Strategy = tuple[Placed, ...]  # the placements to which actions lead


@dataclass(frozen=True)
class Outcome:
    """An estimated or simulated step. Per rank, ``memory`` is the peak relative to usable memory, and
    ``busy`` the share of the step in which it computes."""

    step_s: float
    memory: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def fits(self) -> bool:
        return max(self.memory) <= 1

    @property
    def key(self) -> tuple[float, float]:
        """A sort key: outcomes that fit, by their step; then those that exceed memory, the least first."""
        return (max(max(self.memory), 1.0), self.step_s)

    @property
    def penalised(self) -> tuple[bool, float]:
        """A sort key for climbing: whether it does not fit; then its seconds, increased by the missing memory
        summed over all ranks, so that relieving any rank is progress."""
        excess = sum([share - 1 for share in self.memory if share > 1])
        return excess > 0, self.step_s * (1 + EXCESS * excess)


Judge = Callable[[Strategy], Outcome]


class Fidelity(Enum):
    """The precision with which a strategy is judged: by an estimate of its groups, or by simulating it as a
    whole program."""

    GROUPS = "groups"
    SIMULATED = "simulated"


@dataclass(frozen=True)
class Measure:
    """Judges strategies at a fidelity. ``usable`` are the bytes of each rank's memory that a strategy may
    fill; ``levels`` are the levels of gradient sums, for estimates."""

    space: Space
    optimizer_states: OptimizerStates
    usable: tuple[float, ...]
    fidelity: Fidelity = Fidelity.GROUPS
    levels: Levels | None = None

    @lazy
    def step_of(self) -> Callable[[Strategy], Estimate | Timeline]:
        space, states = self.space, self.optimizer_states
        if self.fidelity is Fidelity.GROUPS:
            return Estimator(space, states, self.levels)
        return lambda strategy: simulate(space.lower(strategy), space.costs, optimizer_states=states)

    def __call__(self, strategy: Strategy) -> Outcome:
        step = self.step_of(strategy)
        memory = tuple(peak / usable for peak, usable in zip(step.peak_memory_bytes, self.usable))
        return Outcome(step.step_s, memory, tuple(seconds / step.step_s for seconds in step.compute_s))


def measure_with(
    space: Space, optimizer_states: OptimizerStates, headroom: float, fidelity: Fidelity = Fidelity.GROUPS
) -> Measure:
    """A judge that leaves ``headroom``, a part of every device's memory, free."""
    usable = tuple(
        usable_bytes(space.costs, rank, headroom) for rank in range(space.costs.cluster.world_size)
    )
    return Measure(space, optimizer_states, usable, fidelity, best_levels(space.costs))


@dataclass
class Evaluator:
    """A judge that remembers its results. ``calls`` counts different strategies, ``improved`` has (calls,
    outcome) at every new best; the search ends when a budget is spent."""

    space: Space
    judge: Judge
    max_calls: int = 2**31
    max_s: float = float("inf")
    best: Strategy | None = None
    outcome: Outcome | None = None
    improved: list[tuple[int, Outcome]] = field(default_factory=list)
    _known: dict[Strategy, Outcome] = field(default_factory=dict)
    _started_s: float = field(default_factory=time.perf_counter)

    @property
    def calls(self) -> int:
        return len(self._known)

    @property
    def spent(self) -> bool:
        return self.calls >= self.max_calls or time.perf_counter() - self._started_s >= self.max_s

    def __call__(self, strategy: Sequence[Action | Placed]) -> Outcome:
        key = placed_of(strategy)
        if key not in self._known:
            outcome = self._known[key] = self.judge(key)
            if self.outcome is None or outcome.key < self.outcome.key:
                self.best, self.outcome = key, outcome
                self.improved.append((self.calls, outcome))
        return self._known[key]

    @property
    def judged(self) -> tuple[Strategy, ...]:
        """All strategies that were judged, in order."""
        return tuple(self._known)

    def ranked(self) -> list[Strategy]:
        """All strategies that were judged, the best first."""
        return sorted(self._known, key=lambda key: self._known[key].key)

    def least_penalised(self, count: int) -> list[Strategy]:
        """The ``count`` best strategies that were judged: those that fit first, then by
        ``Outcome.penalised``."""
        return sorted(self._known, key=lambda key: self._known[key].penalised)[:count]

    def cheapest(self) -> Strategy:
        """The least penalised strategy, whether it fits or not: it may be close to one that fits."""
        return min(self._known, key=lambda key: self._known[key].penalised[1])


def placed_of(strategy: Sequence[Action | Placed]) -> Strategy:
    return tuple(a.placed if isinstance(a, Action) else a for a in strategy)
