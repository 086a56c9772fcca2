"""The unit in which each dim of each value of a graph may be cut.

A view ties dims together: heads x head size are cut in multiples of the head size, and so is the weight that
produced them. The unit of a dim is the least multiple that satisfies every operator that the dim passes
through, the fixed point over shared factors. So every S(d) of a value has one unit, and no two operators
disagree about the size of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..ir import Graph, Shard
from .rule import Call, Rule, call_key, call_of, strategies

Units = dict[str, tuple[int, ...]]  # value -> unit per dim
Tie = list[tuple[str, int, int]]  # dims that are cut together: (value, dim, trailing elements)
CallTie = list[tuple[int, int, int]]  # the same with positions among a call's inputs and results


def shard_units(graph: Graph, rules: dict[str, Rule]) -> Units:
    """The units of all values of a graph; a dim whose unit is its size cannot be cut."""
    units = {name: [1] * len(t.shape) for name, t in graph.types.items()}
    ties = list(_ties_of(graph, rules))
    changed = True
    while changed:
        changed = False
        for tie in ties:
            step = 1
            for name, dim, trailing in tie:
                step = math.lcm(step, math.lcm(units[name][dim], trailing) // trailing)
            for name, dim, trailing in tie:
                size = graph.types[name].shape[dim]
                unit = step * trailing
                if size % unit:
                    unit = size  # no common unit: the dim stays whole
                if units[name][dim] != unit and units[name][dim] != size:
                    units[name][dim] = unit
                    changed = True
    return {name: tuple(dims) for name, dims in units.items()}


def _ties_of(graph: Graph, rules: dict[str, Rule]) -> Iterator[Tie]:
    """Yields the dims that operators cut together, for each strategy that cuts any."""
    positions: dict[tuple, list[CallTie]] = {}  # by call: most operators of a deep model are alike
    for node in graph.nodes:
        rule = rules.get(node.op)
        if rule is None or node.is_leaf or node.is_sink:
            continue
        call = call_of(node, graph.types)
        key = call_key(call)
        if key not in positions:
            positions[key] = _ties(rule, call)
        names = (*node.inputs, *node.results)
        for dims in positions[key]:
            tie = [(name, dim, trailing) for n, dim, trailing in dims if (name := names[n]) is not None]
            if len(tie) > 1 or any(trailing > 1 for _, _, trailing in tie):
                yield tie


def _ties(rule: Rule, call: Call) -> list[CallTie]:
    """The dims that a call cuts together, for each strategy that cuts any."""
    sharded = [option for option in strategies(rule, call) if option.is_sharded]
    if not sharded:
        return []
    bound = rule.bound(call)
    all_dims = (*bound.inputs, *bound.outputs)
    return [
        [
            (n, placement.dim, bound.trailing(dims[placement.dim]))
            for n, (dims, placement) in enumerate(zip(all_dims, (*option.inputs, *option.outputs)))
            if isinstance(placement, Shard)
        ]
        for option in sharded
    ]
