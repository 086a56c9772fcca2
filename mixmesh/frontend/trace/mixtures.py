"""Mixtures of experts as models write them, found by what they do and put into one operator
(``operators.mixtures``).

A model flattens the choices of its router and either sorts them by expert, multiplies each piece by its
expert's matrix and puts the results back in order, or looks up a matrix for every choice. Both are read in
the order of the choices: a value of the sorted rows is remembered as what it would be without sorting, and
whatever treats each row by itself, as its own sharding rule says, does the same to rows in any order. A
region that is read to its end, the sum over the choices of each token, and that nothing else looks into, is
replaced; any other stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ...lang.ir import DType, Graph, Node, Ref, ValueType
from ...lang.operators import count_kept_bytes
from .build import Builder, rewrite
from .dtypes import TORCH_DTYPE
from .mixture_readers import kinds_of, readers_of
from .mixture_region import IDS, POSITIONS, Held, NoMixture, Region

SORTS = ("aten.sort", "aten.sort.stable")


def mixtures_as_operators(graph: Graph) -> Graph:
    """The graph with each mixture of experts as one operator; others are left as they are."""
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

    return rewrite(graph, _Always(rule))


class _Always(dict):
    """One rule for all operators."""

    def __init__(self, rule: Callable) -> None:
        self._rule = rule

    def get(self, key, default=None):
        return self._rule


def _operator(b: Builder, region: Region) -> Ref:
    groups = [tuple(map(Ref, region.inputs[prefix])) for prefix in "xstw"]
    body = "; ".join(region.body)
    meta = [[_meta(b.type(r)) for r in group] for group in groups]
    dtypes = [TORCH_DTYPE[name] for name in region.dtypes]
    kept_bytes = count_kept_bytes(body, *meta, dtypes, region.num_choices)
    return b("mixmesh.experts", Ref(region.ids), *groups, tuple(map(DType, region.dtypes)), body, kept_bytes)


def _meta(value: ValueType) -> torch.Tensor:
    return torch.empty(value.shape, dtype=TORCH_DTYPE[value.dtype], device="meta")


# --- where mixtures begin ------------------------------------------------------------------------------


def _ids_of_mixtures(graph: Graph) -> Iterator[str]:
    """Flat integers that are sorted, or by which matrices are looked up."""
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
    """All that follows from ``ids`` up to the sum over choices. Raises NoMixture."""
    region = Region(graph, ids)
    region.known[ids] = Held(IDS)
    readers = readers_of(region)
    for n, node in enumerate(graph.nodes):
        if node.is_leaf or not any(name in region.known for name in node.inputs):
            continue
        if region.result and region.result in node.inputs and not _others(region, node):
            continue  # behind the region
        held = next((held for read in readers if (held := read(node)) is not None), None)
        if held is None:
            if set(filter(None, kinds_of(region, node))) <= POSITIONS:
                continue  # values worked out of ids alone may be looked at from outside
            raise NoMixture(f"{node.op} at {node.location}")
        region.nodes.add(n)
        region.known.update((r, h) for r, h in zip(node.results, held) if r is not None)
    _check(region)
    return region


def _others(region: Region, node: Node) -> bool:
    return any(name in region.known and name != region.result for name in node.inputs)


def _check(region: Region) -> None:
    """Raises NoMixture for a region without an end."""
    if not region.result or not region.num_experts or not region.inputs["x"]:
        raise NoMixture("no sum over the choices of tokens")
    if not any("@" in step for step in region.body):
        raise NoMixture("no products with the experts' matrices")
