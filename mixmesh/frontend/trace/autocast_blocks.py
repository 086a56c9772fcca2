"""Writes out the ``autocast`` blocks of an exported program: the casts that PyTorch makes within them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from .autocast import Autocast
from .dtypes import DTYPE_NAME
from .recorder import Unknown
from .same_tensors import AUTOCAST, contents_of

CONTEXT = "mixmesh_autocast"  # entry of a node's ``meta``: the ``Context`` of the block around it
TO_COPY = torch.ops.aten._to_copy.default

Context = tuple[str, torch.dtype, bool]  # type of device, dtype, whether the block casts


def without_blocks(module: fx.GraphModule) -> fx.Graph:
    """The graph of a program with what its ``autocast`` blocks contain in their place. Every node from within
    a block has the ``CONTEXT`` of the innermost one."""
    if not any(is_block(node) for node in module.graph.nodes):
        return module.graph
    graph = fx.Graph()
    graph.output(_add(module, graph, {}, None)).meta = dict(module.graph.output_node().meta)
    return graph


def is_block(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == AUTOCAST


def _add(module: fx.GraphModule, graph: fx.Graph, known: dict[fx.Node, Any], context: Context | None) -> Any:
    """Copies the nodes of ``module`` to the end of ``graph``, and returns what ``module`` returns. ``known``
    are the copies of its nodes, at first those of a block's arguments."""
    for node in module.graph.nodes:
        if node in known:
            continue
        if node.op == "output":
            break
        if is_block(node):
            block, held = contents_of(node)
            device, dtype, is_enabled = node.args[:3]
            arguments = {inner: fx.map_arg(outer, known.__getitem__) for inner, outer in held.items()}
            known[node] = _add(block, graph, arguments, (str(device), dtype, bool(is_enabled)))
        elif node.target is operator.getitem and isinstance(results := known.get(node.args[0]), tuple | list):
            known[node] = results[node.args[1]]
        elif node.op != "get_attr" or not all(map(is_block, node.users)):
            known[node] = graph.node_copy(node, known.__getitem__)
            if context is not None:
                known[node].meta[CONTEXT] = context
    return fx.map_arg(module.graph.output_node().args[0], known.__getitem__)


def casting(node: fx.Node) -> Autocast | None:
    """The context in which a node's operator is cast, or None."""
    device, dtype, is_enabled = node.meta.get(CONTEXT, ("", None, False))
    return (device, DTYPE_NAME[dtype]) if is_enabled else None


def is_cast(target: Any, device: str) -> bool:
    """Whether ``autocast`` for a type of device looks at the arguments of this operator. Raises Unknown for a
    device whose operators are not known."""
    key = f"Autocast{device.upper()}"
    if key not in torch._C.DispatchKey.__members__:
        raise Unknown(f"autocast on {device}")
    is_operator = isinstance(target, OpOverload)
    return is_operator and torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)


class Casts(TorchDispatchMode):
    """Finds the arguments that are cast when such an operator is called under ``autocast``. In ``made`` are
    its casts in their order: the argument, the options of ``_to_copy`` and the result."""

    def __init__(self) -> None:
        super().__init__()
        self._has_begun = False  # the operator itself, after its casts
        self.made: list[tuple[Tensor, Mapping[str, Any], Tensor]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is TO_COPY and not self._has_begun:
            self.made.append((args[0], kwargs, result))
        elif func.namespace != "prim":  # which asks for a device or a layout
            self._has_begun = True
        return result
