"""Which outputs of a forward pass have a row per sample.

Operators tie a value's dim 0 to dim 0 of an input, or they do not: ``F.one_hot(y).sum(0)``, with a number for
each class, may be as long as the batch by chance. Then the same call with one sample less tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import MixmeshError
from ...lang.ir import Graph, Node, Shard, batch_size_of
from ...lang.rules import RULES, call_of, strategies


def sources_with_rows(graph: Graph, smaller: Callable[[], Graph]) -> frozenset[str]:
    """The sources of outputs whose dim 0 counts samples. ``smaller`` traces the same call with one sample
    less, which takes seconds: it is called only if a size alone speaks for some output."""
    tied, of_size = values_by_rows(graph)
    doubtful = {name: source for name, source in _sources(graph).items() if source in of_size}
    if not doubtful:
        return tied
    if batch_size_of(n.types[0] for n in graph.batch_inputs) == 1:  # there is no smaller batch
        return tied | of_size
    try:
        other = smaller()
    except MixmeshError:  # a model of this one size: the size has to do
        return tied | of_size
    others = _sources(other)
    kept = {
        source
        for name, source in doubtful.items()
        if name in others and other.types[others[name]].shape[:1] == graph.types[source].shape[:1]
    }
    return tied | (set(doubtful.values()) - kept)


def _sources(graph: Graph) -> dict[str, str]:
    """The value of each output, by the output's name."""
    return {n.args[0]: n.inputs[0] for n in graph.nodes if n.op == "output"}


def first_samples(batch: Any, batch_size: int, count: int) -> Any:
    """The first ``count`` samples of a batch: of its tensors whose dim 0 has the size of the batch."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t[:count] if t.shape[:1] == (batch_size,) else t, batch
    )


def values_by_rows(graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
    """The values whose dim 0 operators tie to dim 0 of an input, and those others that depend on inputs and
    whose dim 0 has the size of the batch."""
    batch_size = batch_size_of(n.types[0] for n in graph.batch_inputs)
    tied = {(n.result, 0) for n in graph.batch_inputs if n.types[0].shape[:1] == (batch_size,)}
    with_rows, from_inputs = {name for name, _ in tied}, {n.result for n in graph.batch_inputs}
    of_size: set[str] = set()
    ties_of: dict[tuple, tuple[tuple[tuple[int, int], ...], ...]] = {}
    for node in graph.nodes:
        if node.is_leaf or node.is_sink or from_inputs.isdisjoint(node.inputs):
            continue
        results = [r for r in node.results if r is not None]
        from_inputs.update(results)
        key = (node.plain, *(graph.types[name] for name in node.inputs))
        if key not in ties_of:
            ties_of[key] = _ties(graph, node)
        values = (*node.inputs, *node.results)
        for tie in ties_of[key]:
            ends = {(name, dim) for n, dim in tie if (name := values[n]) is not None}
            if not tied.isdisjoint(ends):
                tied |= ends
        with_rows.update(r for r in results if (r, 0) in tied)
        of_size.update(r for r in results if graph.types[r].shape[:1] == (batch_size,))
    return frozenset(with_rows), frozenset(of_size - with_rows)


def _ties(graph: Graph, node: Node) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each way to cut an operator, the (position, dim) of the inputs and results that are cut."""
    rule = RULES.get(node.op)
    if rule is None:
        return ()
    options = strategies(rule, call_of(node, graph.types))
    cut = (enumerate((*s.inputs, *s.outputs)) for s in options)
    return tuple(tuple((n, p.dim) for n, p in places if isinstance(p, Shard)) for places in cut)
