"""Helpers for arguments of ``torch.fx`` nodes, whose types in PyTorch allow almost anything."""

from __future__ import annotations

from typing import Any

from torch import fx


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
