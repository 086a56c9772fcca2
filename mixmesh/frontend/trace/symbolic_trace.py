"""A trace with symbols for sizes, which gives the graph for other sizes in a tenth of the time.

It is held against a trace of the same call without symbols, whose names it takes over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from torch import nn

from ...errors import MixmeshError
from ...lang.ir import Graph, Node
from ...lang.ir.graph import with_names
from .capture import Capture
from .convert import Names, convert
from .simplify import IDENTITY_RULES
from .symbolic import Conditions, NotSymbolic, Shape

T = TypeVar("T")


@dataclass(frozen=True)
class SymbolicTrace(Generic[T]):
    """A call of ``model`` that was ``captured`` with symbols, and the ``conditions`` for their numbers.
    ``passes`` make the graph of what was converted, and ``finish`` the result of that graph. In a trace
    without symbols values have the names ``converted`` before the passes, and ``names`` after them."""

    model: nn.Module
    captured: Capture
    conditions: Conditions
    passes: Callable[[Graph], Graph]
    finish: Callable[[Graph], T]
    converted: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def named_as(
        self, converted: Graph, plain: Graph, shapes: Mapping[str, Shape | None]
    ) -> SymbolicTrace[T]:
        """This trace with the names of the same call without symbols for inputs of these ``shapes``, whose
        graph was ``converted``, and is ``plain`` after the passes. Raises NotSymbolic if the latter differs
        in anything else."""
        sizes = self.conditions.sizes(shapes)
        if sizes is None:
            raise NotSymbolic
        graph = convert(self.captured, self.model, sizes)
        named = replace(self, converted=names_of_the_like(graph, converted))
        return replace(named, names=names_of_the_same(named._passed(graph), plain))

    def at(self, shapes: Mapping[str, Shape | None]) -> T | None:
        """The result for inputs of these ``shapes``, by name. None where only a trace of its own is exact, or
        tells what is wrong."""
        try:
            graph = self._graph(shapes)
        except (NotSymbolic, MixmeshError):
            return None
        return None if graph is None else self.finish(renamed(graph, self.names))

    def _graph(self, shapes: Mapping[str, Shape | None]) -> Graph | None:
        sizes = self.conditions.sizes(shapes)
        if sizes is None:
            return None
        return self._passed(convert(self.captured, self.model, sizes))

    def _passed(self, graph: Graph) -> Graph:
        """A converted graph after the passes, which keep some operators by the names of their values."""
        return self.passes(renamed(graph, self.converted))


def names_of_the_like(graph: Graph, other: Graph) -> dict[str, str]:
    """The name of each value of ``graph`` in ``other``, which was converted from the same call; for one that
    only ``graph`` has a name of its own. Export writes out ``x[:]`` with symbols, and not without."""
    waiting: dict[Hashable, deque[Node]] = {}
    for node in other.nodes:
        waiting.setdefault(_likeness(node), deque()).append(node)
    new = Names(other.types).new
    names: dict[str, str] = {}
    same_as: dict[str, str] = {}  # the value of ``other`` that is the same, or of which it is a copy
    for node in graph.nodes:
        node = with_names(node, same_as)
        like = waiting.get(_likeness(node))
        is_copy = not like and node.op in IDENTITY_RULES
        own = like.popleft().results if like else [r if r is None else new(r) for r in node.results]
        named = {r: name for r, name in zip(node.results, own) if r is not None and name is not None}
        names |= named
        same_as |= dict.fromkeys(named, node.inputs[0]) if is_copy else named
    return names


def _likeness(node: Node) -> Hashable:
    """A key that is equal for two nodes that stand for each other in two traces of a call."""
    return node.op, tuple(node.inputs), node.types, node.args if node.is_leaf else ()


def names_of_the_same(graph: Graph, other: Graph) -> dict[str, str]:
    """The name in ``other`` of each value of ``graph``. Raises NotSymbolic if more differs."""
    names: dict[str, str] = {}
    if len(graph.nodes) != len(other.nodes):
        raise NotSymbolic
    for node, same in zip(graph.nodes, other.nodes):
        if replace(with_names(node, names), results=same.results) != same:
            raise NotSymbolic
        for result, name in zip(node.results, same.results, strict=True):
            if (result is None) != (name is None):
                raise NotSymbolic
            if result is not None and name is not None:
                names[result] = name
    return names


def renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    """A graph whose values have other names."""
    nodes = [
        replace(
            with_names(node, names), results=tuple(r if r is None else names.get(r, r) for r in node.results)
        )
        for node in graph.nodes
    ]
    return Graph(graph.name, tuple(nodes), names.get(graph.loss, graph.loss))
