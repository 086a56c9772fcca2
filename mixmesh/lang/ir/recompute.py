"""Rematerialised regions: the backward pass recomputes their values instead of keeping them.

Computations with the attribute ``recompute=N`` form region N. All values that a region reads but does not
compute are kept, including results of collectives, so no collective is ever repeated, whatever comes between
two computations of a region. Every rank runs the region again by itself, right before the backward of its
last computation, and only so far as the backward needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from .instruction import Instruction
from .program import Program


def region_of(i: Instruction) -> int | None:
    """The number of an instruction's region, or None."""
    return i.attr("recompute") if i.attrs else None


def regions(program: Program) -> dict[int, tuple[int, ...]]:
    """The indices of the computations of each region, in order."""
    out: dict[int, list[int]] = {}
    for n, i in enumerate(program.instructions):
        if (number := region_of(i)) is not None:
            out.setdefault(number, []).append(n)
    return {number: tuple(members) for number, members in out.items()}


def with_regions(program: Program, numbers: Mapping[int, int]) -> Program:
    """Returns ``program`` with exactly these regions; ``numbers`` maps indices of computations to regions.

    A region runs again as a whole right before its backward, so the weight gradients in it cannot be split:
    their ``wgrad`` is dropped.
    """

    def marked(n: int, i: Instruction) -> Instruction:
        if (number := numbers.get(n)) == region_of(i):
            return i
        dropped = {"recompute"} if number is None else {"recompute", "wgrad"}
        attrs = tuple((k, v) for k, v in i.attrs if k not in dropped)
        return replace(i, attrs=attrs if number is None else (*attrs, ("recompute", number)))

    marks = tuple(marked(n, i) for n, i in enumerate(program.instructions))
    return program.changed(instructions=marks)


def region_end(program: Program, members: Iterable[int]) -> int | None:
    """The index of the last computation of a region that gets a gradient, or None."""
    grad = program.requires_grad
    return max((n for n in members if program.instructions[n].results[0] in grad), default=None)


def release_points(program: Program, names: Iterable[str]) -> dict[str, int]:
    """Maps each of ``names``, values that the backward pass makes again, to the index of the instruction
    before whose backward they are needed: the last user of the value, or the end of the last region that
    reads it, if that is later, since a region reads all its inputs when it runs again."""
    wanted = set(names)
    last: dict[str, int] = {}
    read: dict[int, set[str]] = {}
    for n, i in enumerate(program.instructions):
        for name in i.inputs:
            if name in wanted:
                last[name] = n
                if (number := region_of(i)) is not None:
                    read.setdefault(number, set()).add(name)
    members = regions(program) if read else {}
    for number, those in read.items():
        end = region_end(program, members[number])
        if end is not None:
            last.update((name, max(last[name], end)) for name in those)
    return last


def updated_buffers(program: Program) -> frozenset[str]:
    """The buffers that the step updates in place, and the values that depend only on these, which may be
    views of them."""
    updated = {u.args[0] for u in program.instructions if u.op == "update"}
    buffers: set[str] = set()
    for i in program.instructions if updated else ():
        if (i.op == "buffer" and i.args[0] in updated) or (i.inputs and buffers.issuperset(i.inputs)):
            buffers.update(r for r in i.results if r is not None)
    return frozenset(buffers)


def buffers_kept_for_backward(program: Program) -> frozenset[str]:
    """The names of buffers that the step updates in place while the backward pass may read their old
    values."""
    stale = updated_buffers(program)
    sources: dict[str, frozenset[str]] = {}  # the buffers that a value may be a view of
    kept: set[str] = set()
    for i in program.instructions if stale else ():
        if i.op == "buffer":
            mine = frozenset(i.args) if i.result in stale else frozenset()
        else:
            mine = frozenset().union(*(sources.get(name, frozenset()) for name in i.inputs))
        for result in i.results:
            if result in program.requires_grad:
                kept |= mine
            elif result in stale:
                sources[result] = mine
    return frozenset(kept)
