"""A record of the operators that run on fake tensors, as nodes of a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._export.utils import _is_cia_op, _is_preservable_cia_op
from torch._higher_order_ops.effects import has_effects
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .fx_nodes import packet_of
from .symbolic import is_symbol

DETACH = torch.ops.aten.detach.default


def stays(target: OpOverload) -> bool:
    """Whether PyTorch's own decomposition keeps an operator that writes nothing."""
    return not _is_cia_op(target) or _is_preservable_cia_op(target)


def check_sizes(value: Any) -> None:
    """Raises Unknown for tensors with sizes that are known only at run time."""
    for part in pytree.tree_leaves(value):
        if isinstance(part, Tensor) and not all(type(size) is int or is_symbol(size) for size in part.shape):
            raise Unknown("sizes that depend on values")


class Unknown(Exception):
    """Something in a program that is left to PyTorch's own decomposition."""


class Recorder(TorchDispatchMode):
    """Appends a node to ``graph`` for every operator that runs on known tensors. Nodes have the names that
    PyTorch's own tracer gives them."""

    def __init__(self, graph: fx.Graph, table: Mapping[Any, Callable]) -> None:
        super().__init__()
        self.graph = graph
        self._table = table
        self._origin: Mapping[str, Any] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []  # so that no other tensor takes the id of one of them

    def decomposition_of(self, target: OpOverload) -> Callable | None:
        """The function that takes an operator apart; None for one that stays whole."""
        return self._table.get(target, None if stays(target) else target.decompose)

    @contextmanager
    def at(self, origin: Mapping[str, Any]) -> Iterator[None]:
        """A context that records operators with the place in the user's file that ``origin`` has."""
        before, self._origin = self._origin, origin
        with self:
            yield
        self._origin = before

    def append(
        self, target: Callable, args: Any, kwargs: Any, value: Any, origin: Mapping[str, Any]
    ) -> fx.Node:
        """Appends a call with the ``value`` that it gives."""
        packet = packet_of(target)
        name = self.graph._target_to_str(packet.__name__)
        node = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=name)
        node.meta = {**origin, "val": value}
        return node

    def know(self, value: Tensor, node: fx.Node) -> None:
        """Notes that ``value`` is the result of ``node``."""
        self._nodes[id(value)] = node
        self._kept.append(value)

    def node_of(self, value: Any) -> Any:
        """The node of a tensor; any other value itself. Raises Unknown for a tensor that no node gives."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            raise Unknown("a tensor from elsewhere")
        return self._nodes[id(value)]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a device or a layout
            return func(*args, **kwargs)
        run = self.decomposition_of(func)
        if run is not None:
            with self:
                value = run(*args, **kwargs)
            if value is not NotImplemented:
                return value
        if func._schema.is_mutable or has_effects(func):
            raise Unknown(f"{func} within a composite")
        value = func(*args, **kwargs)
        check_sizes(value)
        if func is DETACH and not value.is_floating_point():  # it stops no gradient
            self.know(value, self.node_of(args[0]))
            return value
        arguments, options = pytree.tree_map(self.node_of, (args, dict(kwargs)))
        node = self.append(func, arguments, options, value, self._origin)
        if isinstance(value, Tensor):
            self.know(value, node)
        elif isinstance(value, tuple | list):
            for index, part in enumerate(value):
                if isinstance(part, Tensor):
                    self.know(part, self.append(operator.getitem, (node, index), {}, part, self._origin))
        return value
