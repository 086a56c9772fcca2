"""Helpers for arguments of ``torch.fx`` nodes, whose types in PyTorch allow almost anything."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental import proxy_tensor


def node_argument(node: fx.Node, position: int) -> fx.Node:
    """An argument that is known to be a node, with that type."""
    argument = node.args[position]
    assert isinstance(argument, fx.Node)
    return argument


def block_of(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """The submodule that a ``get_attr`` or ``call_module`` node refers to."""
    block = getattr(module, str(node.target))
    assert isinstance(block, fx.GraphModule)
    return block


def target_of(node: fx.Node) -> Any:
    """The operator that a node calls."""
    return node.target


def packet_of(target: Any) -> Any:
    """An operator without its overload; a function that is no operator as it is."""
    return target.overloadpacket if isinstance(target, OpOverload) else target


def slot_of(tensor: Tensor) -> Any:
    """The ``proxy`` and the ``constant`` that the pass which is being exported has for a tensor; None outside
    of an export, and for a tensor that the pass does not know."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
