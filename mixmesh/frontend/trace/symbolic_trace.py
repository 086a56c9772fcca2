"""A trace with symbols for sizes, which gives the graph for other sizes in a tenth of the time.

It is held against a trace of the same call without symbols, whose names it takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from torch import nn

from ...errors import MixmeshError
from ...lang.ir import Graph
from ...lang.ir.graph import with_names
from .capture import Capture
from .convert import convert
from .symbolic import Conditions, NotSymbolic, Shape

T = TypeVar("T")


@dataclass(frozen=True)
class SymbolicTrace(Generic[T]):
    """A call of ``model`` that was ``captured`` with symbols, and the ``conditions`` for their numbers.
    ``passes`` make the graph of what was converted, ``names`` are those that its values have in a trace
    without symbols, and ``finish`` makes the result of the graph."""

    model: nn.Module
    captured: Capture
    conditions: Conditions
    passes: Callable[[Graph], Graph]
    finish: Callable[[Graph], T]
    names: Mapping[str, str] = field(default_factory=dict)

    def named_as(self, plain: Graph) -> SymbolicTrace[T]:
        """This trace with the names of ``plain``, the graph of the same call without symbols. Raises
        NotSymbolic if the two differ in anything else."""
        graph = self._graph(input_shapes(plain))
        if graph is None:
            raise NotSymbolic
        return replace(self, names=names_of_the_same(graph, plain))

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
        return self.passes(convert(self.captured, self.model, sizes))


def input_shapes(graph: Graph) -> dict[str, Shape]:
    """The shape of each input of the batch, by its name."""
    return {str(n.args[0]): n.types[0].shape for n in graph.batch_inputs}


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
