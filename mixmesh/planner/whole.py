"""Finds operators that a device computes for the whole batch although the batch is cut, because their rules
allow nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from ..lang.ir import Graph, Node, Program, Replicate, Shard, TensorType
from ..lang.rules import RULES, Call, Strategy, call_of, strategies

SampleDims = dict[str, int]  # value -> the dim that counts samples


def whole_batch_warnings(graph: Graph, program: Program) -> Iterator[str]:
    """A line for each kind of operator that has a rule, gets samples, cannot be cut between them, and runs
    whole on several ranks of ``program`` while its batch is cut. Operators without a rule are reported
    separately."""
    if not _batch_is_cut(program):
        return
    seen: set[str] = set()
    for node in whole_batch_nodes(graph):
        if node.op not in seen and node.op in RULES and _runs_whole(program, node):
            seen.add(node.op)
            place = f" ({node.location}{', ' + node.source if node.source else ''})" if node.location else ""
            yield f"{node.op}{place} cannot be cut between samples: every device computes all of it"


def whole_batch_nodes(graph: Graph) -> tuple[Node, ...]:
    """Computations on samples that no strategy cuts between them, in the graph's order."""
    dims: SampleDims = {n.result: 0 for n in graph.batch_inputs if n.types[0].shape}
    batch_size = min((graph.types[name].shape[0] for name in dims), default=0)
    weights = {n.result for n in graph.nodes if n.op in ("param", "buffer")}
    nodes = []
    dims_of: dict[tuple, tuple[int | None, ...] | None] = {}  # remembers repeated layers
    for node in graph.nodes:
        if node.is_leaf or node.is_sink:
            continue
        if not any(name in dims for name in node.inputs):
            if any(name in weights for name in node.inputs):
                weights.update(r for r in node.results if r is not None)
            continue
        key = (node.plain, *((graph.types[x], dims.get(x), x in weights) for x in node.inputs))
        if key not in dims_of:
            dims_of[key] = _sample_dims_of_results(node, graph, dims, weights)
        result_dims = dims_of[key]
        if result_dims is None:
            nodes.append(node)
            large = (t.shape and t.num_elements >= batch_size for t in node.types)
            result_dims = tuple(0 if is_large else None for is_large in large)
        dims.update(
            (r, dim) for r, dim in zip(node.results, result_dims) if r is not None and dim is not None
        )
    return tuple(nodes)


def _sample_dims_of_results(
    node: Node, graph: Graph, dims: SampleDims, weights: set[str]
) -> tuple[int | None, ...] | None:
    """The sample dim of each result, None for one that is a sum over samples; None in all if no strategy cuts
    between samples."""
    rule = RULES.get(node.op)
    if rule is None:
        return None
    call = call_of(node, graph.types)
    between = [s for s in strategies(rule, call) if _cuts_samples(s, call, node, dims, weights)]
    if not between:
        return None
    # prefers a strategy that keeps samples separate to one that sums over them
    best = max(between, key=lambda s: sum(isinstance(p, Shard) for p in (*s.outputs, *s.inputs)))
    return tuple(p.dim if isinstance(p, Shard) else None for p in best.outputs)


def _cuts_samples(strategy: Strategy, call: Call, node: Node, dims: SampleDims, weights: set[str]) -> bool:
    """Whether a strategy cuts an input between samples, or else cuts neither samples nor weights."""
    if not strategy.is_sharded:
        return False
    cut = [(name, p.dim) for name, p in zip(node.inputs, strategy.inputs) if isinstance(p, Shard)]
    if any(dims.get(name) == dim for name, dim in cut):
        return True
    return not any(name in dims or name in weights for name, _ in cut)


def _batch_is_cut(program: Program) -> bool:
    return any(i.op == "input" and _is_cut(program, i.type) for i in program.instructions) or any(
        i.op == "local_slice" and program.producers[i.inputs[0]].op == "input" for i in program.instructions
    )


def _is_cut(program: Program, t: TensorType) -> bool:
    return isinstance(t.placement, Shard) and len(program.participants(t)) > 1


def _runs_whole(program: Program, node: Node) -> bool:
    """Whether several ranks each compute the whole of a node."""
    name = next((r for r in node.results if r is not None), None)
    maker = None if name is None else program.producers.get(name)
    if maker is None or maker.op != node.op:
        return False
    cut = any(isinstance(program.types[x].placement, Shard) for x in maker.inputs)
    whole = not cut and all(isinstance(t.placement, Replicate) for t in maker.types)
    return whole and len(program.participants(maker.types[0])) > 1
