"""Finds the tensors that a program writes to, and those that share memory with them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.effects import has_effects
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from .fx_nodes import target_of
from .recorder import Unknown, stays

aten = torch.ops.aten
LIFT, DETACH_IN_PLACE = aten.lift_fresh_copy.default, aten.detach_.default
# write the running statistics, their fourth and fifth arguments, if the sixth holds; no schema says so
NORMS = {aten.batch_norm.default, aten.instance_norm.default}


def writes_of(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """The operators that write to their arguments, and all tensors that may share memory with what is
    written. Raises Unknown for a node that is no plain operator on tensors."""
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            _check(node)
    shared = sharing_with_written(graph)
    if any(node in shared or other in shared for node, other in _of_one_memory(graph)):
        raise Unknown("a write to a tensor of two names")
    return {node for node in graph.nodes if any(written_by(node))}, shared


def sharing_with_written(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that may share memory with what an operator writes to. What a function that is no operator is
    given counts as written; those that switch gradients off are given no tensor."""
    groups = Groups()
    written: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is operator.getitem or isinstance(node.target, OpOverload):
            for other in may_share(node):
                groups.join(node, other)
            written += written_by(node)
        elif node.op == "call_function":
            written += node.all_input_nodes
    roots = {groups.root(node) for node in written}
    return {node for node in graph.nodes if groups.root(node) in roots}


def _of_one_memory(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of leaves that share memory, such as tied weights."""
    first: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            other = first.setdefault(value.untyped_storage()._cdata, node)
            if other is not node:
                yield node, other


def _check(node: fx.Node) -> None:
    target = node.target
    if target is operator.getitem:
        return
    values = pytree.tree_leaves(node.meta.get("val"))
    if not isinstance(target, OpOverload) or any(isinstance(x, NUMBERS) for x in values):
        raise Unknown(str(target))
    if any(isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg()) for x in values):
        raise Unknown("a conjugate that is not computed yet")
    is_norm = "batch_norm" in target._schema.name and target not in NORMS
    is_own = target.namespace != "aten" and target._schema.is_mutable
    is_detached = target is DETACH_IN_PLACE and not _is_lifted(node.args[0])
    if is_norm or is_own or is_detached or has_effects(target):
        raise Unknown(str(target))


NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_lifted(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is LIFT


def may_share(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that may share memory with the result."""
    target = node.target
    if target is operator.getitem:
        yield from node.all_input_nodes
    elif target in NORMS:
        return
    elif isinstance(target, OpOverload) and not stays(target):
        yield from node.all_input_nodes
    else:
        for argument, value in _arguments(node):
            if argument.alias_info is not None:
                yield from _nodes(value)


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that an operator writes to."""
    if node.target in NORMS:
        if node.args[5]:
            yield from (n for n in node.args[3:5] if isinstance(n, fx.Node))
    elif isinstance(node.target, OpOverload) and node.target is not DETACH_IN_PLACE:
        for argument, value in _arguments(node):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _nodes(value)


def _arguments(node: fx.Node) -> Iterator[tuple[torch.Argument, Any]]:
    for place, argument in enumerate(target_of(node)._schema.arguments):
        yield argument, node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


class Groups:
    """Nodes in groups."""

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}

    def root(self, node: fx.Node) -> fx.Node:
        while node in self._parent:
            node = self._parent[node]
        return node

    def join(self, node: fx.Node, other: fx.Node) -> None:
        first, second = self.root(node), self.root(other)
        if first is not second:
            self._parent[first] = second  # a result below what it is a view of, so that paths stay short
