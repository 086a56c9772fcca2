"""The unit in which each dim of each value of a graph may be cut.

A view ties dims together: heads x head size are cut in multiples of the head size, and so is the weight that
produced them. The unit of a dim is the least multiple that satisfies every operator that the dim passes
through, the fixed point over shared factors. So every S(d) of a value has one unit, and no two operators
disagree about the size of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from ..ir import Graph, Node, Shard
from .rule import Rule, call_of, strategies

Units = dict[str, tuple[int, ...]]  # value -> unit per dim
Tie = list[tuple[str, int, int]]  # dims that are cut together: (value, dim, trailing elements)


def shard_units(graph: Graph, rules: dict[str, Rule]) -> Units:
    """The units of all values of a graph; a dim whose unit is its size cannot be cut."""
    units = {name: [1] * len(t.shape) for name, t in graph.types.items()}
    ties = [tie for node in graph.nodes for tie in _ties(graph, node, rules.get(node.op))]
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


def _ties(graph: Graph, node: Node, rule: Rule | None) -> Iterator[Tie]:
    """Yields the dims that an operator cuts together, for each strategy that cuts any."""
    if rule is None or node.is_leaf or node.is_sink:
        return
    call = call_of(node, graph.types)
    sharded = [option for option in strategies(rule, call) if option.is_sharded]
    if not sharded:
        return
    bound = rule.bound(call)
    for option in sharded:
        inputs = zip(node.inputs, bound.inputs, option.inputs)
        outputs = zip(node.results, bound.outputs, option.outputs)
        tie = [
            (name, placement.dim, bound.trailing(dims[placement.dim]))
            for name, dims, placement in chain(inputs, outputs)
            if name is not None and isinstance(placement, Shard)
        ]
        if len(tie) > 1 or any(trailing > 1 for _, _, trailing in tie):
            yield tie
