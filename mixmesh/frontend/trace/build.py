"""Rewriting: one algorithm, and a table of rules from an operator to what stands for it.

A rule is a function of a ``Builder`` and a node that gives, for each of the node's results, a ``Ref`` to
use in its place, or None to keep the node. The nodes that it builds carry the node's place in the user's file
and a name that begins with the node's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ...errors import TraceError
from ...lang.ir import Arg, DType, Graph, Node, Ref, ValueType, map_refs
from .convert import Names
from .dtypes import DTYPE_NAME, TORCH_DTYPE
from .locate import Place
from .schema import normalise, on_meta, overload

Rule = Callable[["Builder", Node], "tuple[Ref | None, ...] | None"]


class Builder:
    def __init__(self, graph: Graph) -> None:
        self.types: dict[str, ValueType] = dict(graph.types)
        self.nodes: list[Node] = []
        self._names = Names(graph.types)
        self._near: Node | None = None

    def __call__(self, op: str, *args: Arg, **kwargs: Arg) -> Ref:
        """Append the operator and return its first result. Its type is what PyTorch infers."""
        return self._append(op, args, kwargs, 1)[0]

    def all(self, op: str, *args: Arg, **kwargs: Arg) -> tuple[Ref, ...]:
        """Append the operator and return all its results."""
        return self._append(op, args, kwargs, None)

    def _append(self, op: str, args: tuple[Arg, ...], kwargs: dict[str, Arg], count: int | None):
        value = self._infer(op, args, kwargs)
        values = tuple(value) if isinstance(value, tuple | list) else (value,)
        types = tuple(ValueType(DTYPE_NAME[v.dtype], tuple(v.shape)) for v in values)
        stem = next((r for r in self._near.results if r is not None), "")
        base = f"{stem}.{op.split('.')[1].strip('_')}"
        names = tuple(self._names.new(base) for _ in types[:count])
        results = names + (None,) * (len(types) - len(names))
        self.types.update(zip(names, types))
        near = self._near
        place = dict(location=near.location, source=near.source, region=near.region)
        self.nodes.append(normalise(Node(results, types, op, args, tuple(kwargs.items()), **place)))
        return tuple(map(Ref, names))

    def made(self, ref: Ref) -> Node:
        """The node that gives a value."""
        return next(n for n in reversed(self.nodes) if ref.name in n.results)

    def type(self, ref: Ref) -> ValueType:
        return self.types[ref.name]

    def begin(self, node: Node) -> None:
        self._near = node

    def _infer(self, op: str, args: tuple[Arg, ...], kwargs: dict[str, Arg]):
        def meta(arg: Arg):
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
    build = Builder(graph)
    alias: dict[str, Ref] = {}
    for node in graph.nodes:
        node = substitute(node, alias)
        build.begin(node)
        rule = rules.get(node.op)
        instead = rule(build, node) if rule else None
        if instead is None:
            build.nodes.append(node)
            continue
        for result, ref in zip(node.results, instead):
            if result is not None:
                _check(node, ref, build.types[result], build)
                alias[result] = ref
    loss = alias.get(graph.loss, Ref(graph.loss)).name
    return Graph(graph.name, tuple(build.nodes), loss)


def _check(node: Node, ref: Ref | None, expected: ValueType, build: Builder) -> None:
    got = None if ref is None else build.type(ref)
    if got != expected:
        raise TraceError(
            f"{node.op} cannot be written out exactly",
            expected=str(expected),
            got=str(got),
            where=str(Place(node.location, node.source)),
            hint="do all inputs of this operator have one dtype?",
        )


def substitute(node: Node, alias: Mapping[str, Ref]) -> Node:
    if not any(name in alias for name in node.inputs):
        return node

    def follow(ref: Ref) -> Ref:
        return alias.get(ref.name, ref)

    kwargs = tuple((k, map_refs(v, follow)) for k, v in node.kwargs)
    return replace(node, args=map_refs(node.args, follow), kwargs=kwargs)
