"""The steps of a problem for the search: which values live, and the effect of each option on them.

A live value is held as a *mask* of placement codes, which includes all codes that can be reached at no cost:
a value held as R can be sliced for free, so its mask has every code. So two states with the same
possibilities are equal, and one state has all possibilities of another if its masks contain the other's. The
masks of a state are packed into one integer, so that both are single comparisons.
"""

from __future__ import annotations

from operator import add
from typing import NamedTuple

from .choices import Need, R
from .lives import BITS
from .problem import Option, Problem, Vector

FULL = (1 << BITS) - 1


class Move(NamedTuple):
    """One step of a path: the option taken and the leaves loaded for it."""

    option: Option
    loads: tuple[Need, ...]


class Transition(NamedTuple):
    """An option together with its loads and conversions, starting from certain masks.

    ``wait``/``wait_back``: seconds of collectives that all ranks wait for; ``forward``/``backward``: seconds
    of each class. ``new``: the changed masks of the values that live afterwards, packed.
    """

    move: Move
    wait: float
    wait_back: float
    forward: Vector
    backward: Vector
    new: int


class Steps:
    """The transitions of a problem, each computed when a state first needs it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.count = len(problem.steps)
        self.lives = problem.choices.lives
        self.live = self.lives.live
        self.kinds = problem.choices.kinds
        self._closures: dict[tuple[int, int], int] = {}
        self._loads: dict[tuple[tuple[Need, ...], int], int | None] = {}  # by an option's needs and a value
        self._load_s: dict[tuple[int, int, float], Vector] = {}
        self._cheapest: dict[tuple[int, int, int], tuple[float, float] | None] = {}
        self._transitions: list[dict[tuple[int, ...], tuple[Transition, ...]]] = [
            {} for _ in range(self.count)
        ]

    def entry(self, step: int, packed: int) -> int:
        """The values held on entry to the folded middle around a state; 0 outside of folded middles."""
        inside = sum(1 for v in self.live[step] if v >= 0)
        return packed >> (BITS * inside)

    def closure(self, value: int, code: int) -> int:
        """Placements reachable at no cost once ``value`` is held as ``code``."""
        key = (self.kinds[value], code)
        if key not in self._closures:
            self._closures[key] = self._closure(value, code)
        return self._closures[key]

    def _closure(self, value: int, code: int) -> int:
        convert = self.problem.convert
        codes = range(2 + len(self.problem.types[value].shape))
        mask = 1 << code
        for other in codes:
            if other != code and convert(value, code, other) == (0.0, 0.0):
                # and if everything else costs no more from there
                prices = [(convert(value, code, t), convert(value, other, t)) for t in codes]
                if all(b is None or (a is not None and a[0] <= b[0] and a[1] <= b[1]) for a, b in prices):
                    mask |= 1 << other
        return mask

    def masks(self, step: int, packed: int) -> dict[int, int]:
        return {v: packed >> (BITS * n) & FULL for n, v in enumerate(self.live[step])}

    def needed(self, step: int, packed: int) -> dict[int, int]:
        """The masks of the live values that a step needs."""
        return {self.live[step][n]: packed >> (BITS * n) & FULL for n in self.lives.needed[step]}

    def transitions(self, step: int, packed: int) -> tuple[Transition, ...]:
        key = tuple([packed >> (BITS * n) & FULL for n in self.lives.needed[step]])
        by_mask = self._transitions[step]
        if key not in by_mask:
            held = self.needed(step, packed)
            outcomes = [self.transition(step, held, o) for o in self.problem.options[step]]
            by_mask[key] = _undominated([t for t in outcomes if t is not None])
        return by_mask[key]

    def after(self, step: int, packed: int, transition: Transition) -> int | None:
        """The masks after a step; None if it leaves a folded middle with less than was held on entry.

        The values held on entry are stored as their complement: a state that must return to less is the
        better one, so that one comparison serves for all.
        """
        out = transition.new
        for old, width, new in self.lives.carried[step]:
            out |= (packed >> old & width) << new
        for old, new in self.lives.left[step]:
            owed = ~(packed >> old) & FULL
            if owed & ~(out >> new):
                return None
        if self.lives.entered[step]:
            after = self.live[step + 1]
            for n, value in enumerate(after):
                if value < 0:
                    held = out >> (BITS * after.index(-1 - value)) & FULL
                    out |= (~held & FULL) << (BITS * n)
        return out

    def transition(self, step: int, before: dict[int, int], option: Option) -> Transition | None:
        """The transition of an option if the live values are held as ``before``; None if it is impossible."""
        problem, weight, closure = self.problem, self.problem.weights[step], self.closure
        held = dict(before)
        loads: list[Need] = []
        wait = wait_back = 0.0
        forward, backward = option.forward, option.backward
        for value, code in option.needs:
            mask = held.get(value)
            if mask is None:
                load = self.load(option, value)
                if load is None:
                    return None
                loads.append((value, load))
                held[value] = mask = closure(value, load)
                backward = tuple(map(add, backward, self.load_s(value, load, weight)))
            if mask >> code & 1:
                continue
            price = self.cheapest(value, mask, code)
            if price is None:
                return None
            held[value] = mask | closure(value, code)
            if problem.waits(value):
                wait, wait_back = wait + weight * price[0], wait_back + weight * price[1]
            else:
                forward = tuple([t + weight * price[0] for t in forward])
        for value, code in option.gives:
            held[value] = closure(value, code)
        new, shifts = 0, self.lives.shifts[step]
        for value, mask in held.items():
            if value in shifts:
                new |= mask << shifts[value]
        move = Move(option, tuple(loads))
        return Transition(move, wait, wait_back, forward, backward, new)

    def load(self, option: Option, value: int) -> int | None:
        """The code with which an option loads a leaf: the forced one, or else the needed one; R if two are
        needed."""
        key = option.needs, value
        if key not in self._loads:
            self._loads[key] = self._load(option, value)
        return self._loads[key]

    def _load(self, option: Option, value: int) -> int | None:
        codes = [code for v, code in option.needs if v == value]
        forced = self.problem.forced.get(value)
        if forced is not None:
            load = self.problem.load(value, forced)
            prices = [load, *(self.problem.convert(value, forced, code) for code in codes)]
            return None if None in prices else forced
        if len(codes) == 1 and self.problem.load(value, codes[0]) is not None:
            return codes[0]
        if self.problem.load(value, R) is None:
            return None
        return R if all(self.problem.convert(value, R, code) is not None for code in codes) else None

    def load_s(self, value: int, code: int, weight: float) -> Vector:
        """Seconds of each class that a leaf held as ``code`` adds to the backward pass, times ``weight``."""
        key = (value, code, weight)
        if key not in self._load_s:
            load = self.problem.load(value, code)
            assert load is not None  # otherwise no option needs it
            self._load_s[key] = tuple([weight * (load.sync_s + seconds) for seconds in load.optimizer])
        return self._load_s[key]

    def cheapest(self, value: int, mask: int, code: int) -> tuple[float, float] | None:
        """The lowest price of making ``code`` from the placements in which a value is held."""
        key = (self.kinds[value], mask, code)
        if key not in self._cheapest:
            self._cheapest[key] = self._find_cheapest(value, mask, code)
        return self._cheapest[key]

    def _find_cheapest(self, value: int, mask: int, code: int) -> tuple[float, float] | None:
        best = None
        for src in range(mask.bit_length()):
            if mask >> src & 1:
                price = self.problem.convert(value, src, code)
                if price is not None and (best is None or sum(price) < sum(best)):
                    best = price
        return best


def _undominated(made: list[Transition]) -> tuple[Transition, ...]:
    kept: list[Transition] = []
    for t in made:
        if not any(_covers(k, t) for k in kept):
            kept = [k for k in kept if not _covers(t, k)] + [t]
    return tuple(kept)


def _covers(a: Transition, b: Transition) -> bool:
    """Whether ``a`` leads to all that ``b`` leads to, at no higher cost for any class."""
    return (
        a.new | b.new == a.new
        and a.wait <= b.wait
        and a.wait_back <= b.wait_back
        and all(map(float.__le__, a.forward, b.forward))
        and all(map(float.__le__, a.backward, b.backward))
    )
