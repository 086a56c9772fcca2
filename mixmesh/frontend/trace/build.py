"""Rewrites graphs by a table of rules from operators to their replacements.

A rule is a function of a ``Builder`` and a node. It returns a ``Ref`` to use in place of each of the node's
results, or None to keep the node. The nodes that it builds have the place of the node in the user's file, and
names that begin with the node's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import TraceError
from ...lang.ir import Arg, DType, Graph, Node, Ref, ValueType, with_names
from .convert import Names
from .dtypes import DTYPE_NAME, TORCH_DTYPE
from .locate import Place
from .schema import normalise, on_meta, overload

Rule = Callable[["Builder", Node], "tuple[Ref | None, ...] | None"]
NOWHERE = Node((), (), "")  # used until the place of the replaced node is known


class Builder:
    """The nodes of a graph that is being built."""

    def __init__(self, graph: Graph) -> None:
        self.types: dict[str, ValueType] = dict(graph.types)
        self.nodes: list[Node] = []
        self._names = Names(graph.types)
        self._replaced = NOWHERE

    def __call__(self, op: str, *args: Arg, **kwargs: Arg) -> Ref:
        """Appends an operator, with the types that PyTorch infers, and returns its first result."""
        return self._append(op, args, kwargs, 1)[0]

    def all(self, op: str, *args: Arg, **kwargs: Arg) -> tuple[Ref, ...]:
        """Appends an operator and returns all its results."""
        return self._append(op, args, kwargs, None)

    def _append(
        self, op: str, args: tuple[Arg, ...], kwargs: dict[str, Arg], count: int | None
    ) -> tuple[Ref, ...]:
        value = self._infer(op, args, kwargs)
        values = tuple(value) if isinstance(value, tuple | list) else (value,)
        types = tuple(ValueType(DTYPE_NAME[v.dtype], tuple(v.shape)) for v in values)
        near = self._replaced
        stem = next((r for r in near.results if r is not None), "")
        base = f"{stem}.{op.split('.')[1].strip('_')}"
        names = tuple(self._names.new(base) for _ in types[:count])
        results = names + (None,) * (len(types) - len(names))
        self.types.update(zip(names, types))
        options = tuple(kwargs.items())
        node = Node(results, types, op, args, options, near.location, near.source, near.region)
        self.nodes.append(normalise(node))
        return tuple(map(Ref, names))

    def producer(self, ref: Ref) -> Node:
        """The node that has a value as its result."""
        return next(n for n in reversed(self.nodes) if ref.name in n.results)

    def type(self, ref: Ref) -> ValueType:
        return self.types[ref.name]

    def begin(self, node: Node) -> None:
        """Begins the replacement of a node; nodes built from here on have its place."""
        self._replaced = node

    def _infer(self, op: str, args: tuple[Arg, ...], kwargs: dict[str, Arg]) -> Any:
        def meta(arg: Arg) -> Any:
            match arg:
                case Ref():
                    value = self.type(arg)
                    return torch.empty(value.shape, dtype=TORCH_DTYPE[value.dtype], device="meta")
                case DType():
                    return TORCH_DTYPE[arg.name]
                case tuple():
                    return [meta(a) for a in arg]
            return arg

        target = on_meta(op)
        options = {k: meta(v) for k, v in kwargs.items()}
        if any(a.name == "device" for a in overload(op)._schema.arguments) and "device" not in options:
            options["device"] = "meta"
        with torch.no_grad():
            return target(*map(meta, args), **options)


def rewrite(graph: Graph, rules: Mapping[str, Rule]) -> Graph:
    """Applies ``rules``, by operator. Raises TraceError for a replacement of another type."""
    build = Builder(graph)
    alias: dict[str, str] = {}
    for node in graph.nodes:
        node = with_names(node, alias)
        build.begin(node)
        rule = rules.get(node.op)
        instead = rule(build, node) if rule else None
        if instead is None:
            build.nodes.append(node)
            continue
        for result, ref in zip(node.results, instead):
            if result is not None:
                alias[result] = _checked(node, ref, build.types[result], build).name
    return Graph(graph.name, tuple(build.nodes), alias.get(graph.loss, graph.loss))


def _checked(node: Node, ref: Ref | None, expected: ValueType, build: Builder) -> Ref:
    """Returns a replacement of the expected type. Raises TraceError for another."""
    if ref is not None and build.type(ref) == expected:
        return ref
    raise TraceError(
        f"{node.op} cannot be written out exactly",
        expected=str(expected),
        got=str(None if ref is None else build.type(ref)),
        where=str(Place(node.location, node.source)),
        hint="do all inputs of this operator have one dtype?",
    )
