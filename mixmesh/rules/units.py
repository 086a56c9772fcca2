"""The unit in which each dim of each value may be cut, for a whole graph.

A view ties dims together: heads x head size are cut in multiples of the head size, and so is the weight
that produced them. The unit of a dim is the least multiple that satisfies every operator it passes
through, found as a fixed point over shared factors. Every S(d) of a value then has one unit, so two
operators never disagree about the size of a shard.
"""

from __future__ import annotations

import math

from ..ir import Graph, Shard
from .rule import Rule, call_of, strategies

Units = dict[str, tuple[int, ...]]  # value -> unit per dim


def shard_units(graph: Graph, rules: dict[str, Rule]) -> Units:
    """Units for all values of a graph; a unit equal to the size means that the dim cannot be cut."""
    units = {name: [1] * len(t.shape) for name, t in graph.types.items()}
    ties: list[list[tuple[str, int, int]]] = []  # per sharded factor: (value, dim, trailing elements)
    for node in graph.nodes:
        rule = rules.get(node.op)
        if rule is None or node.is_leaf or node.is_sink:
            continue
        call = call_of(node, graph.types)
        options = strategies(rule, call)
        sharded = [o for o in options if o.is_sharded]
        if not sharded:
            continue
        bound = rule.bound(call)
        for option in sharded:
            tie = []
            for name, dims, placement in zip(node.inputs, bound.inputs, option.inputs):
                if isinstance(placement, Shard):
                    tie.append((name, placement.dim, bound.trailing(dims[placement.dim])))
            for name, dims, placement in zip(node.results, bound.outputs, option.outputs):
                if name is not None and isinstance(placement, Shard):
                    tie.append((name, placement.dim, bound.trailing(dims[placement.dim])))
            if any(trailing > 1 for _, _, trailing in tie) or len(tie) > 1:
                ties.append(tie)
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
                    unit = size  # no common cut: the dim stays whole
                if units[name][dim] != unit and units[name][dim] != size:
                    units[name][dim] = unit
                    changed = True
    return {name: tuple(dims) for name, dims in units.items()}
