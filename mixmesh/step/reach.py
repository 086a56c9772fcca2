"""Finds the ranks on which gradients arrive, and the uses of parameters through views.

If only one rank's copy of a replicated value counts (``as_partial``), the other ranks get no gradient for it
or for its inputs, and zeros pass none. A redistribution in which no rank sends anything is a view to
autograd: its source's gradient comes when the view's does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ..cost.outline import Outline, is_factored
from ..lang.ir import Instruction, Partial, Program, Replicate
from .again import gathers_again

Ranks = frozenset[int]


def is_local(outline: Outline, i: Instruction) -> bool:
    """Whether neither a redistribution nor its gradient sends anything."""
    return outline.exchanges[i.result, False] is None and outline.exchanges[i.result, True] is None


def is_view(outline: Outline, i: Instruction) -> bool:
    """Whether autograd has no node for a redistribution: each rank either keeps its copy or drops it."""
    held = outline.program.types[i.inputs[0]].placement
    goes_on = isinstance(held, Replicate) and isinstance(i.type.placement, Replicate | Partial)
    return goes_on and is_local(outline, i)


def reach(outline: Outline) -> Mapping[str, Ranks]:
    """For each value that takes a gradient, the ranks on which one arrives; only values for which some
    holders get none."""
    program = outline.program
    if not _may_lose(outline):
        return {}
    triggers = {*gathers_again(program), *(n for n, i in enumerate(program.instructions) if is_factored(i))}
    able = _able(outline, triggers)
    on: dict[str, set[int]] = {name: set() for name in able}
    loss = program.types[program.loss]
    counting = program.participants(loss)
    on[program.loss] = able[program.loss].intersection(
        counting[:1] if isinstance(loss.placement, Replicate) else counting
    )
    for n in range(len(program.instructions) - 1, -1, -1):
        i = program.instructions[n]
        if not i.is_leaf and outline.flows[n]:
            if n in triggers:  # autograd reaches it on all ranks
                on |= {r: able[r] for r in i.results[:1] if r is not None}
            here = set().union(*(on[r] for r in i.results if r in on))
            for name in i.inputs:
                if name in on:
                    on[name] |= able[name] & _passed(outline, i, name, here)
    return {
        name: frozenset(ranks)
        for name, ranks in on.items()
        if ranks != {*program.participants(program.types[name])}
    }


def _able(outline: Outline, triggers: Collection[int]) -> dict[str, set[int]]:
    """For each value that takes a gradient, the ranks on which it depends on an input that does, or on one of
    the ``triggers`` of gathers."""
    program = outline.program
    able: dict[str, set[int]] = {}
    for n, i in enumerate(program.instructions):
        for r, t in zip(i.results, i.types):
            if r is None or r not in program.requires_grad:
                continue
            holders = {*program.participants(t)}
            dependent = [_kept(program, i, name) & able[name] for name in i.inputs if name in able]
            is_everywhere = i.is_leaf or (n in triggers and r == i.results[0])
            able[r] = holders if is_everywhere else holders & _meeting(outline, i).union(*dependent)
    return able


def _may_lose(outline: Outline) -> bool:
    """Whether anything in the program may leave a rank without a gradient."""
    program = outline.program
    if isinstance(program.types[program.loss].placement, Replicate):
        return True
    return any(
        i.is_redistribution and outline.flows[n] and _may_lose_in(outline, i)
        for n, i in enumerate(program.instructions)
    )


def _may_lose_in(outline: Outline, i: Instruction) -> bool:
    """Whether a redistribution leaves out some ranks that do not all continue with the value they hold."""
    program = outline.program
    source, target = program.types[i.inputs[0]], i.type
    before, after = {*program.participants(source)}, {*program.participants(target)}
    becomes_addend = isinstance(source.placement, Replicate) and isinstance(target.placement, Partial)
    return (becomes_addend or before != after) and not before | after <= _meeting(outline, i)


def _kept(program: Program, i: Instruction, name: str) -> set[int]:
    """The ranks that hold an input and use it without communication."""
    held = {*program.participants(program.types[name])}
    becomes_addend = i.is_redistribution and isinstance(i.type.placement, Partial)
    if becomes_addend and isinstance(program.types[name].placement, Replicate):
        both = held & {*program.participants(i.type)}
        return {min(both)} if both else set()  # disjoint ranks: the value travels
    return held


def _passed(outline: Outline, i: Instruction, name: str, here: set[int]) -> set[int]:
    """The ranks on which an instruction gives a gradient to an input if its results have gradients ``here``.
    In a redistribution, ranks without a gradient send zeros."""
    kept = _kept(outline.program, i, name)
    return (here & kept) | (
        _meeting(outline, i) & {*outline.program.participants(outline.program.types[name])}
    )


def _meeting(outline: Outline, i: Instruction) -> set[int]:
    """The ranks that send or receive something in a redistribution or for its gradient."""
    if not i.is_redistribution:
        return set()
    both = (outline.exchanges[i.result, backward] for backward in (False, True))
    return {rank for exchange in both if exchange is not None for rank in exchange.ranks}


def uses_of(outline: Outline, name: str) -> Iterator[tuple[int, str]]:
    """The instructions that pass a value a gradient, by index, each with the name that it uses: the value's
    own or that of a view of it."""
    for n in outline.uses.get(name, ()):
        i = outline.program.instructions[n]
        if outline.flows[n]:
            if i.is_redistribution and is_view(outline, i):
                yield from uses_of(outline, i.result)
            else:
                yield n, name


def taking(outline: Outline, n: int, name: str, on: Mapping[str, Ranks]) -> set[int]:
    """The ranks on which the backward of instruction ``n`` gives its input ``name`` a gradient; ``on`` is the
    result of ``reach``."""
    program = outline.program
    i = program.instructions[n]
    here: set[int] = set()
    for result, t in zip(i.results, i.types):
        if result in program.requires_grad:
            here.update(on[result] if result in on else program.participants(t))
    held = on[name] if name in on else program.participants(program.types[name])
    return _passed(outline, i, name, here).intersection(held)
