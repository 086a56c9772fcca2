"""A lower bound of the cost that remains: the search problem relaxed to a forest, solved backwards.

Every step is given to one of its inputs, its *parent* (the one computed last; none if all are leaves).
The relaxation lets a step have its other inputs as it likes and counts every class of ranks for itself,
as if it never waited for another. What then remains is a forest that is solved exactly, from the last
step to the first:

    below(k, o)  = cost of option o of step k + sum over its results v of held(v, what o gives)
    held(v, m)   = sum over the steps k whose parent v is of  min over o of below(k, o),
                   one of them plus the conversion of v from what is held (m) to what o needs

A conversion is charged for one of the steps only, because the others may share it: for the one that makes
the bound highest. So no conversion, load or execution is counted twice, and the bound never exceeds the
true remainder; where the graph is a chain and one class decides, it equals it.
"""

from __future__ import annotations

from .problem import Option, Problem, Vector
from .steps import BITS, FULL, Steps


class Bound:
    """Least remaining seconds of each class, by step and state; last, of the mean over the classes.

    The mean is for options of which each class prefers another (a dim that divides better for one): no
    path gives every class its favourite.
    """

    def __init__(self, problem: Problem, steps: Steps) -> None:
        self.problem, self.steps = problem, steps
        self.parent: list[int | None] = [self._parent(n) for n in range(steps.count)]
        self.children: dict[int, list[int]] = {}  # value -> steps whose parent it is, last first
        self._below: list[list[tuple[Option, Vector]]] = [[] for _ in range(steps.count)]
        self._one: dict[tuple[int, int], Vector] = {}
        self._held: dict[tuple[int, int, int], Vector] = {}
        self._remaining: list[dict[int, Vector]] = [{} for _ in range(steps.count + 1)]
        self._ahead: dict[int, list[tuple[int, int, int]]] = {}
        rest = lift(problem.nothing)
        self.roots: list[Vector] = [rest] * (steps.count + 1)
        for step in reversed(range(steps.count)):
            self._below[step] = [(o, self._cost(step, o)) for o in problem.options[step]]
            parent = self.parent[step]
            if parent is None:
                rest = _add(rest, _least([cost for _, cost in self._below[step]]))
            else:
                self.children.setdefault(parent, []).append(step)
            self.roots[step] = rest

    def _parent(self, step: int) -> int | None:
        ids = [self.problem.ids[name] for name in self.problem.steps[step].inputs]
        computed = [v for v in ids if v not in self.problem.leaves]
        return max(computed, default=None)  # values are numbered in the order of computation

    def _cost(self, step: int, option: Option) -> Vector:
        problem = self.problem
        cost = _add(option.forward, option.backward)
        for value in {v for v, _ in option.needs}:
            if value not in problem.leaves:
                continue
            if value in problem.tracked and problem.choices.first_uses[value] != step:
                continue
            code = self.steps.load(option, value)
            if code is None:
                return lift((float("inf"),) * len(cost))
            load = problem.load(value, code)
            weight = problem.weights[step]
            cost = tuple(t + weight * (load.sync_s + o) for t, o in zip(cost, load.optimizer))
        cost = lift(cost)
        for value, code in option.gives:
            if value in self.children:
                children = len(self.children[value])
                cost = _add(cost, self.held(value, children, self.steps.closure(value, code)))
        return cost

    def held(self, value: int, children: int, mask: int) -> Vector:
        """The remainder below a value of which ``children`` steps are still to come."""
        key = (value, children, mask)
        if key not in self._held:
            steps = self.children[value][:children]
            free = [self._child(step, value, FULL) for step in steps]
            total = free[0]
            for other in free[1:]:
                total = _add(total, other)
            best = total
            for step, without in zip(steps, free):
                charged = self._child(step, value, mask)
                best = tuple(max(b, t - w + c) for b, t, w, c in zip(best, total, without, charged))
            self._held[key] = best
        return self._held[key]

    def _child(self, step: int, value: int, mask: int) -> Vector:
        key = (step, mask)
        if key not in self._one:
            costs = []
            weight = self.problem.choices.value_weights[value]
            for option, cost in self._below[step]:
                worst = 0.0
                for v, code in option.needs:
                    if v == value and not mask >> code & 1:
                        price = self.steps.cheapest(value, mask, code)
                        worst = max(worst, sum(price) * weight if price is not None else float("inf"))
                costs.append(tuple([t + worst for t in cost]) if worst else cost)
            self._one[key] = _least(costs)
        return self._one[key]

    def remaining(self, step: int, packed: int) -> Vector:
        known = self._remaining[step]
        if packed not in known:
            total = self.roots[step]
            for shift, value, children in self._to_come(step):
                total = _add(total, self.held(value, children, packed >> shift & FULL))
            known[packed] = total
        return known[packed]

    def _to_come(self, step: int) -> list[tuple[int, int, int]]:
        """Live values with how many of the steps whose parent they are come at ``step`` or later; first,
        where their masks are."""
        if step not in self._ahead:
            self._ahead[step] = [
                (BITS * n, value, children)
                for n, value in enumerate(self.steps.live[step])
                # the last ones come first in the list: those before ``step`` are done
                if (children := sum(1 for s in self.children.get(value, ()) if s >= step))
            ]
        return self._ahead[step]


def lift(vector: Vector) -> Vector:
    """Seconds of the classes and their mean."""
    return (*vector, sum(vector) / len(vector))


def _add(a: Vector, b: Vector) -> Vector:
    return tuple(map(float.__add__, a, b))


def _least(vectors: list[Vector]) -> Vector:
    return tuple(map(min, zip(*vectors)))
