"""Chooses the weight gradients that every rank computes for itself from gathered factors.

The gradient of a weight is a product of two factors, one row per sample (Xie et al., UAI'16). Summing it over
``n`` ranks moves ``2 (n - 1) / n`` times its bytes; gathering both factors moves ``(n - 1) / n`` times
theirs, but then every rank computes the product over all samples. Which is faster depends on the batch, the
links and the slowest device. Without overlap a minimum cut gives the answer (``cut``); it is tried first, and
the simulator decides.
"""

from __future__ import annotations

from collections.abc import Callable

from ...cost import CostModel
from ...cost.exchanges import held_share
from ...cost.placed import op_time
from ...cost.table import split_by_factors
from ...lang.ir import Instruction, Program
from .apply import factorable, with_factors
from .cut import Product, cheapest_cut


def saved_s(program: Program, i: Instruction, costs: CostModel) -> float:
    """Seconds of communication that ``sfb`` saves on an instruction."""
    x, weight, y = program.types[i.inputs[0]], program.types[i.inputs[1]], i.type
    ranks = program.participants(x)
    gather = costs.collective("all_gather", ranks)
    summed = costs.collective("all_reduce", ranks).seconds(weight.value.size_bytes)
    return summed - gather.seconds(x.value.size_bytes) - gather.seconds(y.value.size_bytes)


def repeated_s(program: Program, i: Instruction, costs: CostModel) -> float:
    """The slowest rank's additional seconds: the product over all samples, minus that over its own."""
    longer = []
    for rank in program.participants(program.types[i.inputs[0]]):
        _, (product,) = split_by_factors(program, i, (op_time(program, i, costs, costs.class_of[rank]),))
        share = held_share(program, program.types[i.inputs[0]], rank)
        longer.append(product.backward.at(1.0) - product.backward.at(share))
    return max(longer)


def cut_factors(program: Program, costs: CostModel) -> frozenset[str]:
    """The weights whose factors a minimum cut would gather. Factors that several products need are sent only
    once."""
    products, gather_s = [], {}
    known_s: dict[tuple, float] = {}  # by kind of product: repeated layers have only a few kinds
    for name, (i,) in factorable(program).items():
        ranks = program.participants(i.type)
        gather = costs.collective("all_gather", ranks)
        needed = (i.inputs[0], f"{i.result} grad")
        for tensor, t in zip(needed, (program.types[i.inputs[0]], i.type)):
            gather_s[tensor] = gather.seconds(t.value.size_bytes)
        summed = costs.collective("all_reduce", ranks).seconds(program.types[name].value.size_bytes)
        operands = [(program.types[operand], operand in program.requires_grad) for operand in i.inputs]
        kind = (i.plain, i.types, *operands)
        if kind not in known_s:
            known_s[kind] = repeated_s(program, i, costs)
        products.append(Product(name, summed - known_s[kind], needed))
    return cheapest_cut(products, gather_s)


def most_saved_s(program: Program, costs: CostModel) -> float:
    """Seconds of communication that are saved if all weights that gain by it travel as factors."""
    gains = (sum(saved_s(program, i, costs) for i in users) for users in factorable(program).values())
    return sum(gain for gain in gains if gain > 0)


def best_factors(program: Program, costs: CostModel, judge: Callable[[Program], tuple]) -> Program | None:
    """The program with ``sfb`` wherever that lowers ``judge`` (a key, least is best); None if it never does.

    The minimum cut is tried first as a whole; then weights of one shape and batch are changed together, those
    that save most first.
    """
    kinds: dict[tuple, frozenset[str]] = {}
    gains: dict[tuple, float] = {}
    for name, users in factorable(program).items():
        gain = sum(saved_s(program, i, costs) for i in users)
        if gain > 0:
            kind = tuple((program.types[i.inputs[0]].value, program.types[name].value) for i in users)
            kinds[kind] = kinds.get(kind, frozenset()) | {name}
            gains[kind] = gains.get(kind, 0.0) + gain
    if not kinds:
        return None
    best, applied, chosen = judge(program), frozenset[str](), program
    seed = cut_factors(program, costs)
    if seed and (score := judge(tried := with_factors(program, seed))) < best:
        best, applied, chosen = score, seed, tried
    for kind in sorted(kinds, key=lambda k: -gains[k]):
        names = kinds[kind]
        other = applied - names if names <= applied else applied | names
        if other != seed and (score := judge(tried := with_factors(program, other))) < best:
            best, applied, chosen = score, other, tried
    return chosen if applied else None
