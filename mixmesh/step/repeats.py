"""Regions that run again, in the order in which the backward pass meets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..lang.ir import Instruction, Program, regions
from ..lang.rules import call_of
from .kept import extra_bytes, kept


@dataclass(frozen=True)
class Repeat:
    """A region that runs again: its ``members``, the last of which is ``at``, are recomputed from ``inputs``
    right before the backward of instruction ``at``. The inputs are kept until the backward of ``first``."""

    at: int
    first: int
    members: tuple[int, ...]
    inputs: tuple[str, ...]


def repeats(program: Program) -> dict[int, Repeat]:
    """The repeated regions, by ``at``. A region that keeps nothing for the backward pass is never
    recomputed."""
    out = {}
    for members in regions(program).values():
        instructions = [program.instructions[n] for n in members]
        keeping = [n for n in members if keeps_something(program, n)]
        if keeping:
            results = {r for i in instructions for r in i.results}
            read = dict.fromkeys(name for i in instructions for name in i.inputs if name not in results)
            at = keeping[-1]
            out[at] = Repeat(at, keeping[0], tuple(n for n in members if n <= at), tuple(read))
    return out


def keeps_something(program: Program, n: int) -> bool:
    """Whether autograd keeps a tensor for computation ``n``."""
    i = program.instructions[n]
    if not any(r in program.requires_grad for r in i.results):
        return False
    return any(True for _ in _kept(program, i)) or extra_bytes(call_of(i, program.types)) > 0


def kept_inputs(program: Program, i: Instruction) -> set[str]:
    """The inputs of a computation that autograd keeps."""
    if not any(r in program.requires_grad for r in i.results):
        return set()
    return {i.inputs[n] for what, n in _kept(program, i) if what == "input"}


def _kept(program: Program, i: Instruction) -> Iterator[tuple[str, int]]:
    """Like ``kept``, for a computation through which a gradient passes."""
    return kept(call_of(i, program.types), tuple(name in program.requires_grad for name in i.inputs))
