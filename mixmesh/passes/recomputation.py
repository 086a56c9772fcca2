"""Activation checkpointing (Chen et al., 2016): which computations of a program are worth recomputing.

A program is cut where little is held between its parts, in a transformer between the layers; a region lies
between two cuts. Only values that cross the ends of a region are kept, because those within are recomputed
right before their backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ..cost import VIEWS
from ..cost.calls import is_computation
from ..lang.ir import Program, with_regions
from ..lang.ir.recompute import updated_buffers
from ..lang.ir.samples import draws_once
from ..lang.rules import call_of
from ..step.kept import extra_bytes, kept

Regions = tuple[tuple[int, ...], ...]
MAX_LEVELS = 48  # limit on the tried limits of bytes held at a cut; equal layers need fewer


def recomputed(program: Program) -> Program:
    """``program`` with its regions (``divided``) recomputed, except for the last ones, which may keep as many
    bytes between the passes as the largest other region makes again later."""
    live = _Live(program)
    numbers: dict[int, int] = {}
    for number, region in enumerate(live.earlier(live.divided())):
        chosen = list(region)
        for n in reversed(region):
            rest = [m for m in chosen if m != n]
            if live.kept_bytes(region, rest) <= live.kept_bytes(region, chosen):
                chosen = rest  # rematerialising n would save nothing
        numbers |= dict.fromkeys(chosen, number)
    return with_regions(program, numbers)


def divided(program: Program) -> Regions:
    """Divides a program's computations into the regions that keep the fewest bytes, by an estimate: the bytes
    that cross the ends of all regions, plus those that the largest region keeps inside."""
    return _Live(program).divided()


def can_run_again(program: Program, n: int, stale: frozenset[str]) -> bool:
    """Whether an instruction may be in a region (see ``check``)."""
    i = program.instructions[n]
    if not is_computation(i) or (i.attrs and i.attr("sfb", False)):
        return False
    return not draws_once(i.op) and stale.isdisjoint(i.inputs)


class _Live:
    """Bytes of a program's activations that are held after each computation, for any reason."""

    def __init__(self, program: Program) -> None:
        self.program = program
        stale = updated_buffers(program)
        self.computations = [n for n in range(len(program.instructions)) if can_run_again(program, n, stale)]
        self.root: dict[str, str] = {}  # for each view, the value whose memory it shows
        self.activations: set[str] = set()
        self.last: dict[str, int] = {}  # last use of each value, and of a view's base
        last = self.last
        first_made: dict[str, int] = {}
        from_batch: set[str] = set()
        for n, i in enumerate(program.instructions):
            for name in i.inputs:
                last[name] = last[self.root.get(name, name)] = n
            if i.op == "input" or not from_batch.isdisjoint(i.inputs):
                from_batch.update(r for r in i.results if r is not None)
            for r in i.results:
                if r is None or r not in from_batch or i.is_leaf:
                    continue
                viewed = i.op in VIEWS and i.inputs[0] in self.activations
                self.root[r] = self.root[i.inputs[0]] if viewed else r
                self.activations.add(r)
                if r in program.requires_grad:
                    first_made.setdefault(self.root[r], n)
        self.held = self._held_bytes(first_made)
        self.keeps = {n: self._kept(n) for n in self.computations}

    def _held_bytes(self, made: dict[str, int]) -> dict[int, float]:
        """Bytes of activations at each computation, each held from where it is ``made`` until its last
        use."""
        changes = [0.0] * (len(self.program.instructions) + 1)
        for name, n in made.items():
            size_bytes = self.program.types[name].value.size_bytes
            changes[n] += size_bytes
            changes[max(self.last.get(name, n), n)] -= size_bytes
        able, totals = set(self.computations), enumerate(accumulate(changes))
        return {n: total for n, total in totals if n in able}

    def _kept(self, n: int) -> tuple[tuple[str, float], ...]:
        """The activations that autograd keeps of a computation, with their bytes."""
        i = self.program.instructions[n]
        if not any(r in self.program.requires_grad for r in i.results):
            return ()
        call = call_of(i, self.program.types)
        takes = tuple(name in self.program.requires_grad for name in i.inputs)
        names = [i.results[at] if what == "result" else i.inputs[at] for what, at in kept(call, takes)]
        extra = extra_bytes(call)
        beside = ((f"beside {n}", extra),) if extra else ()
        return (*((name, self._size(name)) for name in self._roots(names)), *beside)

    def _roots(self, names: Sequence[str | None]) -> dict[str, None]:
        return dict.fromkeys(self.root[name] for name in names if name in self.activations)

    def _size(self, name: str) -> float:
        return float(self.program.types[name].value.size_bytes)

    def divided(self) -> Regions:
        levels = sorted(set(self.held.values()))
        levels = levels[:: -(-len(levels) // MAX_LEVELS)] if levels else []
        estimates = {parts: self.estimate(parts) for parts in dict.fromkeys(map(self.cut, levels))}
        return min(estimates, key=lambda parts: (estimates[parts], len(parts)), default=())

    def cut(self, level: float) -> Regions:
        """Regions that end where at most ``level`` bytes are held."""
        out: list[tuple[int, ...]] = []
        region: list[int] = []
        for n in self.computations:
            region.append(n)
            if self.held[n] <= level and any(self.keeps[m] for m in region):
                out.append(tuple(region))
                region = []
        return (*out, tuple(region)) if region else tuple(out)

    def kept_bytes(self, region: Sequence[int], again: Sequence[int]) -> float:
        """Unsharded bytes kept of a region if the computations ``again`` run again."""
        instructions = self.program.instructions
        results = {r for n in again for r in instructions[n].results}
        read = [x for n in again for x in instructions[n].inputs if x not in results]
        leaving = [
            r
            for n in region
            for r in instructions[n].results
            if r is not None and self.last.get(r, -1) > region[-1]
        ]
        sizes = {name: self._size(name) for name in self._roots([*read, *leaving])}
        for n in set(region).difference(again):
            sizes.update(self.keeps[n])
        return sum(sizes.values())

    def inside(self, region: Sequence[int]) -> float:
        """Unsharded bytes that a region keeps without running again."""
        return sum(dict(pair for n in region for pair in self.keeps[n]).values())

    def earlier(self, parts: Regions) -> Regions:
        """All regions except the last ones, which together keep no more than the largest of the others; the
        very last is always left out."""
        sizes = [self.inside(region) for region in parts]
        count = max(len(parts) - 1, 0)
        while count > 1 and sum(sizes[count - 1 :]) <= max(sizes[: count - 1]):
            count -= 1
        return parts[:count]

    def estimate(self, parts: Regions) -> float:
        """Unsharded bytes that are kept between the passes, and the most that a region keeps in addition."""
        crossing: set[str] = set()
        inside = [0.0]
        for members in parts:
            instructions = [self.program.instructions[n] for n in members]
            own = {r for i in instructions for r in i.results}
            crossing.update(self._roots([x for i in instructions for x in i.inputs if x not in own]))
            inside.append(self.inside(members))
        return sum(map(self._size, crossing)) + max(inside)
