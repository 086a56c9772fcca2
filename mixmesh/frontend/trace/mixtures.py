"""Finds mixtures of experts by their computations, and replaces each by one operator
(``operators.mixtures``).

A model flattens the choices of its router. Then it either sorts them by expert, multiplies each group by its
expert's matrix and restores the order, or it looks up a matrix for every choice. The reader follows both in
the order of the choices: for a value of sorted rows it keeps the unsorted value, and operators whose sharding
rule says that they treat every row by itself work the same in any order. A region is replaced if it ends in
the sum over the choices of each token, and nothing outside reads its inner values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...lang.ir import DType, Graph, Node, Ref, ValueType
from ...lang.operators import Operands, count_kept_bytes
from .build import Builder, rewrite
from .dtypes import TORCH_DTYPE
from .mixture_readers import kinds_of, read_node
from .mixture_region import IDS, POSITIONS, Held, NoMixture, Region

SORTS = ("aten.sort", "aten.sort.stable")


def mixtures_as_operators(graph: Graph) -> Graph:
    """Replaces each mixture of experts that can be read by one operator."""
    region_of: dict[int, Region] = {}
    for ids in dict.fromkeys(_ids_of_mixtures(graph)):
        try:
            region = read_region(graph, ids)
        except NoMixture:
            continue
        region_of[max(region.nodes)] = region
    if not region_of:
        return graph
    last = {id(graph.nodes[n]): region for n, region in region_of.items()}

    def rule(b: Builder, node: Node) -> tuple[Ref] | None:
        region = last.get(id(node))
        return None if region is None else (_operator(b, region),)

    return rewrite(graph, {graph.nodes[n].op: rule for n in region_of})


def _operator(b: Builder, region: Region) -> Ref:
    groups = [tuple(map(Ref, region.inputs[prefix])) for prefix in "xstw"]
    body = "; ".join(region.body)
    tokens, values, tables, whole = ([_meta(b.type(r)) for r in group] for group in groups)
    operands = Operands(tokens, values, tables, whole, [TORCH_DTYPE[name] for name in region.dtypes])
    kept_bytes = count_kept_bytes(body, operands, region.num_choices)
    return b("mixmesh.experts", Ref(region.ids), *groups, tuple(map(DType, region.dtypes)), body, kept_bytes)


def _meta(value: ValueType) -> torch.Tensor:
    return torch.empty(value.shape, dtype=TORCH_DTYPE[value.dtype], device="meta")


# --- where mixtures begin ------------------------------------------------------------------------------


def _ids_of_mixtures(graph: Graph) -> Iterator[str]:
    """Yields flat integers that are sorted, or that index a table of matrices."""
    for node in graph.nodes:
        if node.op in SORTS:
            name = node.inputs[0]
        elif node.op == "aten.index.Tensor" and len(graph.types[node.inputs[0]].shape) == 3:
            name = node.inputs[-1]
        else:
            continue
        value = graph.types[name]
        if len(value.shape) == 1 and value.dtype in ("i64", "i32"):
            yield name


# --- reading -------------------------------------------------------------------------------------------


def read_region(graph: Graph, ids: str) -> Region:
    """Reads all nodes that depend on ``ids``, up to the sum over choices. Raises NoMixture."""
    region = Region(graph, ids)
    region.facts[ids] = Held(IDS)
    for n, node in enumerate(graph.nodes):
        if node.is_leaf or not any(name in region.facts for name in node.inputs):
            continue
        if region.result and region.result in node.inputs and not _others(region, node):
            continue  # after the region
        held = read_node(region, node)
        if held is None:
            if set(filter(None, kinds_of(region, node))) <= POSITIONS:
                continue  # nodes outside may read values that follow from the ids alone
            raise NoMixture(f"{node.op} at {node.location}")
        region.nodes.add(n)
        region.facts.update((r, h) for r, h in zip(node.results, held) if r is not None)
    _check(region)
    return region


def _others(region: Region, node: Node) -> bool:
    return any(name in region.facts and name != region.result for name in node.inputs)


def _check(region: Region) -> None:
    """Raises NoMixture for a region whose end was not found."""
    if not region.result or not region.num_experts or not region.inputs["x"]:
        raise NoMixture("no sum over the choices of tokens")
    if not any("@" in step for step in region.body):
        raise NoMixture("no products with the experts' matrices")
