"""Simulates strategies: each once, and keeps the best ever seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...cost.levels import best_levels
from ...lang.optimizer_states import OptimizerStates
from ...simulator import Simulation, Timeline
from ..placement import Action, Estimate, Estimator, Placed, Space
from ..ratios import usable_bytes

Actions = tuple[Action, ...]  # one per group, in the order of the groups
Strategy = tuple[Placed, ...]  # the placements that actions come down to


@dataclass(frozen=True)
class Outcome:
    """A simulated step. ``memory`` and ``busy`` are per rank: the peak over what is usable, and the share of
    the step in which it computes."""

    step_s: float
    memory: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def fits(self) -> bool:
        return max(self.memory) <= 1

    @property
    def key(self) -> tuple[float, float]:
        """To compare: what fits, by its step; then what fits least badly."""
        return (max(max(self.memory), 1.0), self.step_s)


Judge = Callable[[Strategy], Outcome]


def estimated(space: Space, optimizer_states: OptimizerStates, headroom: float) -> Judge:
    """The judge by the estimate of groups. ``headroom`` is the part of a device's memory left free."""
    levels = best_levels(space.costs)
    estimate, usable = Estimator(space, optimizer_states, levels), _usable(space, headroom)
    return lambda strategy: _outcome(estimate(strategy), usable)


def simulated(space: Space, optimizer_states: OptimizerStates, headroom: float) -> Judge:
    """The judge by the simulator: the whole program of a strategy."""
    usable = _usable(space, headroom)

    def judge(strategy: Strategy) -> Outcome:
        program = space.lower(strategy)
        return _outcome(Simulation(program, space.costs, optimizer_states).run(program), usable)

    return judge


def _usable(space: Space, headroom: float) -> list[float]:
    return [usable_bytes(space.costs, r, headroom) for r in range(space.costs.cluster.world_size)]


def _outcome(step: Estimate | Timeline, usable: Sequence[float]) -> Outcome:
    return Outcome(
        step.step_s,
        tuple(peak / most for peak, most in zip(step.peak_memory_bytes, usable)),
        tuple(seconds / step.step_s for seconds in step.compute_s),
    )


@dataclass
class Evaluator:
    """A judge with a memory. ``calls`` counts different strategies, ``improved`` is (calls, outcome) at every
    new best; the search ends where a budget does."""

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

    def ranked(self) -> list[Strategy]:
        """All that were judged, the best first."""
        return sorted(self._known, key=lambda key: self._known[key].key)


def placed_of(strategy: Sequence[Action | Placed]) -> Strategy:
    return tuple(a.placed if isinstance(a, Action) else a for a in strategy)
