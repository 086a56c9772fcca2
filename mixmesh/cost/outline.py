"""Facts of a program that need no costs: uses of values, where gradients flow, its collectives."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.lazy import lazy
from ..lang.ir import Instruction, Program, Shard, TensorType
from .calls import Kind, kinds_of
from .exchanges import Exchange, exchange_of


class Outline:
    """The facts of one program, each computed on first use."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @lazy
    def kinds(self) -> Sequence[Kind | None]:
        """The kind of each instruction; None if it computes nothing."""
        return kinds_of(self.program)

    @lazy
    def uses(self) -> dict[str, list[int]]:
        """Indices of the instructions that use each value."""
        out: dict[str, list[int]] = {}
        for n, i in enumerate(self.program.instructions):
            for name in dict.fromkeys(i.inputs):
                out.setdefault(name, []).append(n)
        return out

    @lazy
    def flows(self) -> tuple[bool, ...]:
        """For each instruction, whether the backward pass goes through it."""
        grad = self.program.requires_grad
        return tuple(any(r in grad for r in i.results) for i in self.program.instructions)

    @lazy
    def exchanges(self) -> dict[tuple[str, bool], Exchange | None]:
        """Exchanges by the result of a redistribution, and by whether it is in the backward pass."""
        out: dict[tuple[str, bool], Exchange | None] = {}
        both_by_ends: dict[tuple[TensorType, TensorType], tuple[Exchange | None, Exchange | None]] = {}
        by_identity: dict[tuple[int, int], tuple[Exchange | None, Exchange | None]] = {}
        types = self.program.types
        for i in self.program.instructions:
            if i.is_redistribution:
                ends = types[i.inputs[0]], i.type
                both = by_identity.get((id(ends[0]), id(ends[1])))
                if both is None:
                    if ends not in both_by_ends:
                        forward = exchange_of(self.program, i, backward=False)
                        both_by_ends[ends] = forward, exchange_of(self.program, i, backward=True)
                    both = by_identity[id(ends[0]), id(ends[1])] = both_by_ends[ends]
                out[i.result, False], out[i.result, True] = both
        return out


def first_uses(program: Program) -> dict[str, int]:
    """Index of the first instruction that uses each value."""
    out: dict[str, int] = {}
    for n, i in enumerate(program.instructions):
        for name in i.inputs:
            out.setdefault(name, n)
    return out


def is_synchronised(program: Program, i: Instruction) -> bool:
    """Whether a parameter's gradient must be summed over ranks after the backward pass."""
    return (
        i.op == "param"
        and i.result in program.requires_grad
        and (
            i.args[0] in program.copies
            or (not isinstance(i.type.placement, Shard) and len(program.participants(i.type)) > 1)
        )
        and i.result not in program.factored
    )


def summed_params(program: Program) -> list[Instruction]:
    """The parameters whose gradients are summed after the backward pass; of a parameter's copies only the
    first."""
    return [i for i in program.params if is_synchronised(program, i) and is_first(program, i)]


def is_first(program: Program, param: Instruction) -> bool:
    """Whether no earlier instruction loads the same parameter."""
    copies = program.copies.get(param.args[0])
    return copies is None or copies[0].result == param.result


def is_stored(program: Program, i: Instruction) -> bool:
    """Whether a redistribution fetches a parameter that is stored sharded: its gradient goes straight to the
    parameter, and is awaited only at the end of the backward pass."""
    source = program.producers[i.inputs[0]]
    return source.op == "param" and isinstance(source.type.placement, Shard)


def purpose_of(program: Program, i: Instruction) -> str:
    """The purpose of a redistribution's process group. Redistributions of parameters and their gradients have
    their own, as values computed from samples need not wait for them."""
    return "parameter" if is_stored(program, i) else "data"


def is_resharded(program: Program, i: Instruction) -> bool:
    """Whether a gathered parameter is freed after its last use and gathered again (ZeRO-3)."""
    return i.op == "all_gather" and bool(i.attr("reshard", False)) and is_stored(program, i)


def is_factored(i: Instruction) -> bool:
    return bool(i.attrs) and bool(i.attr("sfb", False))
