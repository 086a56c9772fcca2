"""Finds the reasons why no program has a certain placement of a value."""

from __future__ import annotations

from ..errors import MixmeshError
from ..lang.ir import PARTIAL, REPLICATE, Node, Placement, Shard
from ..lang.rules import PatternMismatch, call_of, strategies
from ..search.synthesis import Problem
from ..search.synthesis.choices import code_of


def why_not(problem: Problem, name: str, placement: Placement) -> str:
    """The reason why ``name`` cannot be made (or loaded, if it is a leaf) as ``placement``; empty if there is
    none."""
    value, code = problem.ids[name], code_of(placement)
    if len(problem.ranks) == 1 and placement != REPLICATE:
        return f"rank {problem.ranks[0]} works alone: there is nothing to share out"
    if isinstance(placement, Shard) and not problem.can_shard(value, code):
        return uncut(problem, name, placement.dim)
    node = problem.graph.producers[name]
    if node.is_leaf:
        if placement == PARTIAL:
            return f"{LEAF_WORDS[node.op]} is held whole or cut, never as addends"
        if problem.load(value, code) is None:
            return f"{LEAF_WORDS[node.op]} is held whole"
        return ""
    step = problem.steps.index(node)
    if any((value, code) in choice.gives for choice in problem.choices.choices[step]):
        return ""
    return _why_no_strategy(problem, node, node.results.index(name), placement)


LEAF_WORDS = {"param": "a parameter", "buffer": "a buffer", "input": "an input", "const": "a constant"}


def uncut(problem: Problem, name: str, dim: int) -> str:
    """The reason why a dim cannot be cut in two."""
    value = problem.ids[name]
    size, unit = problem.types[value].shape[dim], problem.choices.unit(value, dim)
    if size < 2:
        return f"dim {dim} has {size} element{'s' * (size != 1)}"
    if unit > 1:
        return (
            f"dim {dim}, of {size}, is cut in units of {unit} as the operators around it need it: "
            "that is one piece"
        )
    return f"dim {dim}, of {size}, cannot be cut in two"


def _why_no_strategy(problem: Problem, node: Node, result: int, wanted: Placement) -> str:
    rule = problem.choices.rules.get(node.op)
    if rule is None:
        return f"{node.op} has no sharding rule, so it runs replicated"
    call = call_of(node, problem.graph.types)
    fitting = [s for s in strategies(rule, call) if code_of(s.outputs[result]) == code_of(wanted)]
    if wanted == REPLICATE or not fitting:
        try:
            text = f": its rule is {rule.text(call)[0]!r}"
        except (PatternMismatch, MixmeshError):
            text = ", whose shapes its rule does not cover"
        if wanted == PARTIAL and not rule.linear:
            text += ", and it is not linear"
        return f"no strategy of {node.op} gives {wanted}{text}"
    for strategy in fitting:
        placed = [*zip(node.inputs, strategy.inputs), *zip(node.results, strategy.outputs)]
        for other, p in placed:
            if other is not None and isinstance(p, Shard):
                if not problem.can_shard(problem.ids[other], code_of(p)):
                    return f"{node.op} would need %{other} as {p}, and {uncut(problem, other, p.dim)}"
    if not any(r in problem.choices.varying for r in node.results):
        return "it depends on no input and no parameter: every rank makes it for itself"
    return "it is small and holds no samples: whole, it is cut for nothing where a piece is wanted"
