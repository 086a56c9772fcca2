"""Finds the weights that sufficient factors fit, and makes a program that uses them."""

from __future__ import annotations

from ...lang.ir import Instruction, Program, Replicate, Shard, region_of, users_of, with_attrs


def factorable(program: Program) -> dict[str, tuple[Instruction, ...]]:
    """Weights that ``sfb`` would fit, with the instructions that use each."""
    users = users_of(program.instructions)
    out: dict[str, tuple[Instruction, ...]] = {}
    for i in program.instructions:
        if i.op == "aten.linear" and region_of(i) is None and _fits(program, i):
            parameters = i.inputs[1:]
            # a tied weight, or one that is also redistributed, is summed like any other
            if all(users[name] == [i] for name in parameters):
                out[i.inputs[1]] = (i,)
    return out


def _fits(program: Program, i: Instruction) -> bool:
    x, *parameters = (program.types[name] for name in i.inputs)
    dealt = isinstance(x.placement, Shard) and x.placement.dim < len(x.value.shape) - 1
    ranks = program.participants(x)
    return (
        dealt
        and len(ranks) > 1
        and i.inputs[1] in program.requires_grad
        and all(isinstance(t.placement, Replicate) and program.participants(t) == ranks for t in parameters)
        and all(program.producers[name].op == "param" for name in i.inputs[1:])
    )


def with_factors(program: Program, weights: frozenset[str]) -> Program:
    """``program`` with ``sfb`` on the users of these weights, whose gradients then leave their buckets."""
    chosen = {i.result for name, users in factorable(program).items() if name in weights for i in users}
    parameters = {
        name for i in program.instructions if not chosen.isdisjoint(i.results) for name in i.inputs[1:]
    }
    out = []
    for i in program.instructions:
        if not chosen.isdisjoint(i.results):
            i = with_attrs(i, (*i.attrs, ("sfb", True)))
        elif i.op == "param" and i.result in parameters:
            i = with_attrs(i, tuple((k, v) for k, v in i.attrs if k != "bucket"))
        out.append(i)
    return program.changed(instructions=tuple(out))
