"""Sufficient factors: whose weight gradients every rank computes for itself from gathered factors.

The gradient of a weight is a product of two factors, one row per sample (Xie et al., UAI'16). Summing it
over ``n`` ranks moves ``2 (n - 1) / n`` times its bytes; gathering both factors moves ``(n - 1) / n`` times
theirs, but then every rank computes the product over all samples. Which is faster depends on the batch,
the links and the slowest device, so it is decided by the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .cost import CostModel
from .ir import Instruction, Program, Replicate, Shard


def factorable(program: Program) -> dict[str, tuple[Instruction, ...]]:
    """Weights that ``sfb`` would fit, with the instructions that use each."""
    users: dict[str, list[Instruction]] = {}
    for i in program.instructions:
        for name in dict.fromkeys(i.inputs):
            users.setdefault(name, []).append(i)
    out = {}
    for i in program.instructions:
        if i.op == "aten.linear" and _fits(program, i):
            parameters = i.inputs[1:]
            # a tied weight, or one that is redistributed as well, is summed like any other
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


def saved_s(program: Program, i: Instruction, costs: CostModel) -> float:
    """Seconds of communication that ``sfb`` saves on an instruction."""
    x, weight, y = program.types[i.inputs[0]], program.types[i.inputs[1]], i.type
    ranks = program.participants(x)
    gather = costs.collective("all_gather", ranks)
    summed = costs.collective("all_reduce", ranks).seconds(weight.value.size_bytes)
    return summed - gather.seconds(x.value.size_bytes) - gather.seconds(y.value.size_bytes)


def with_factors(program: Program, weights: frozenset[str]) -> Program:
    """``program`` with ``sfb`` on the users of these weights, whose gradients are in no bucket then."""
    chosen = {id(i) for name, users in factorable(program).items() if name in weights for i in users}
    parameters = {name for i in program.instructions if id(i) in chosen for name in i.inputs[1:]}
    out = []
    for i in program.instructions:
        if id(i) in chosen:
            i = replace(i, attrs=(*i.attrs, ("sfb", True)))
        elif i.op == "param" and i.result in parameters:
            i = replace(i, attrs=tuple((k, v) for k, v in i.attrs if k != "bucket"))
        out.append(i)
    return replace(program, instructions=tuple(out))


def best_factors(program: Program, costs: CostModel, judge: Callable[[Program], tuple]) -> Program | None:
    """The program with ``sfb`` where that makes ``judge`` (a key, least is best) less; None where it never
    does.

    Weights of one shape and batch are decided together, those that save most first.
    """
    kinds: dict[tuple, list[str]] = {}
    gains: dict[tuple, float] = {}
    for name, users in factorable(program).items():
        gain = sum(saved_s(program, i, costs) for i in users)
        if gain > 0:
            kind = tuple((program.types[i.inputs[0]].value, program.types[name].value) for i in users)
            kinds.setdefault(kind, []).append(name)
            gains[kind] = gains.get(kind, 0.0) + gain
    if not kinds:
        return None
    taken: frozenset[str] = frozenset()
    best = judge(program)
    for kind in sorted(kinds, key=lambda k: -gains[k]):
        trial = judge(with_factors(program, taken | set(kinds[kind])))
        if trial < best:
            taken, best = taken | set(kinds[kind]), trial
    return with_factors(program, taken) if taken else None
