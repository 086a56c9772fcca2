"""A lower bound of the cost that remains: the search problem relaxed to a forest, solved backwards.

Every step is assigned to one of its inputs, its *parent* (the largest, whose conversions cost most, and among
equal ones the one computed last; none if all are leaves). The relaxation lets a step have its other inputs in
any placement, and counts every class of ranks separately, as if it never waited for another. That leaves a
forest that is solved exactly, from the last step to the first:

    below(k, o)  = cost of option o of step k + sum over its results v of held(v, what o gives)
    held(v, m)   = min over the sets C that v may be converted to from what is held (m) of  price of C
                   + sum over the steps k whose parent v is of  min over o of below(k, o), of those o that
                   need v as m or C have it

A conversion is charged once, as steps share it. So no conversion, load or execution is counted twice, and the
bound never exceeds the true remainder; where the graph is a chain and one class decides, it equals it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

from .choices import R
from .lives import BITS
from .problem import Option, Problem, Vector
from .steps import FULL, Steps


class Bound:
    """Least remaining seconds of each class, by step and state, and as a last entry of the mean over the
    classes.

    The mean helps if each class prefers another option (a dim that divides better for one): no path gives
    every class its favourite.
    """

    def __init__(self, problem: Problem, steps: Steps) -> None:
        self.problem, self.steps = problem, steps
        self.parent = problem.choices.parents
        self.children: dict[int, list[int]] = {}  # value -> steps whose parent it is, last first
        # for each option of a step, the placements that it needs of the step's parent, as a mask, and its
        # remainder
        self._below: list[list[tuple[int, Vector]]] = [[] for _ in range(steps.count)]
        self._one: dict[tuple[int, int], Vector] = {}
        self._converted: dict[tuple[int, int, float, int], list[tuple[int, float]]] = {}
        # for each step, the most codes of its parent that an option needs
        self._codes: list[int] = [0] * steps.count
        self._held: dict[tuple[int, int], dict[int, Vector]] = {}  # by value and children, then mask
        self._remaining: list[dict[int, Vector]] = [{} for _ in range(steps.count + 1)]
        self._ahead: dict[int, list[tuple[int, dict[int, Vector], int, int]]] = {}
        rest = lift(problem.nothing)
        self.roots: list[Vector] = [rest] * (steps.count + 1)
        for step in reversed(range(steps.count)):
            parent = self.parent[step]
            self._below[step] = [(o.of_parent, self._cost(step, o)) for o in problem.options[step]]
            self._codes[step] = max([o.of_parent.bit_count() for o in problem.options[step]], default=0)
            if parent is None:
                rest = _add(rest, _least([cost for _, cost in self._below[step]]))
            else:
                self.children.setdefault(parent, []).append(step)
            self.roots[step] = rest

    def _cost(self, step: int, option: Option) -> Vector:
        steps, cost = self.steps, option.seconds
        for value in option.loads:
            code = steps.load(option, value)
            if code is None:
                return lift((float("inf"),) * len(cost))
            cost = _add(cost, steps.load_s(value, code, self.problem.weights[step]))
        cost = lift(cost)
        for value, code in option.gives:
            children = self.children.get(value)
            if children is not None:
                cost = _add(cost, self.held(value, len(children), steps.closure(value, code)))
        return cost

    def held(self, value: int, children: int, mask: int) -> Vector:
        """The remainder below a value with ``children`` steps still to come."""
        bound_of = self._held.setdefault((value, children), {})
        if mask not in bound_of:
            steps = self.children[value][:children]
            totals: list[Sequence[float]] = []
            for converted, price in self._conversions(
                value, mask, sum([self._codes[step] for step in steps])
            ):
                below = [self._child(step, converted) for step in steps]
                seconds: Sequence[float] = below[0] if len(below) == 1 else list(map(sum, zip(*below)))
                totals.append([price + s for s in seconds] if price else seconds)
            bound_of[mask] = _least(totals)
        return bound_of[mask]

    def _child(self, step: int, mask: int) -> Vector:
        """The lower bound from ``step`` on if ``value`` is only ever held as the mask says."""
        key = (step, mask)
        if key not in self._one:
            costs = [cost for needed, cost in self._below[step] if needed & mask == needed]
            self._one[key] = _least(costs) if costs else (float("inf"),) * (len(self.problem.classes) + 1)
        return self._one[key]

    def _conversions(self, value: int, mask: int, most: int) -> list[tuple[int, float]]:
        """The masks of all placements in which ``value`` may end up held, with the least seconds to get there
        by at most ``most`` conversions, which is how many placements later steps need."""
        key = (self.steps.kinds[value], mask, weight := self.problem.choices.value_weights[value], most)
        if key not in self._converted:
            every = [(mask, 0.0, 0)]
            for code in range(2, 2 + len(self.problem.types[value].shape)):
                every += [
                    (have | self.steps.closure(value, code), seconds + sum(price) * weight, count + 1)
                    for have, seconds, count in every
                    if not have >> code & 1 and (price := self.steps.cheapest(value, have, code)) is not None
                ]
            whole = min(
                seconds + sum(price) * weight
                for have, seconds, _ in every
                if (price := self.steps.cheapest(value, have, R)) is not None
            )
            # a value held whole can be converted to every placement for nothing, so larger sets are of no use
            useful = [(have, seconds) for have, seconds, count in every if count <= most and seconds < whole]
            useful.append((mask | self.steps.closure(value, R), whole))
            self._converted[key] = useful
        return self._converted[key]

    def remaining(self, step: int, packed: int) -> Vector:
        bound_of = self._remaining[step]
        total = bound_of.get(packed)
        if total is None:
            total = self.roots[step]
            for shift, by_mask, value, children in self._to_come(step):
                mask = packed >> shift & FULL
                below = by_mask.get(mask) or self.held(value, children, mask)
                total = tuple(map(add, total, below))
            bound_of[packed] = total
        return total

    def _to_come(self, step: int) -> list[tuple[int, dict[int, Vector], int, int]]:
        """Live values, each with the number of steps from ``step`` on whose parent it is, the position of its
        mask, and the known remainders by mask."""
        if step not in self._ahead:
            self._ahead[step] = [
                (BITS * n, self._held.setdefault((value, children), {}), value, children)
                for n, value in enumerate(self.steps.live[step])
                # later steps come first in the list: those before ``step`` are done
                if (children := sum(1 for s in self.children.get(value, ()) if s >= step))
            ]
        return self._ahead[step]


def lift(vector: Vector) -> Vector:
    """Appends the mean to the seconds of the classes."""
    return (*vector, sum(vector) / len(vector))


def _add(a: Vector, b: Vector) -> Vector:
    return tuple(map(add, a, b))


def _least(vectors: Sequence[Sequence[float]]) -> Vector:
    return tuple(vectors[0]) if len(vectors) == 1 else tuple(map(min, zip(*vectors)))
