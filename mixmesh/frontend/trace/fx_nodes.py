"""Nodes of ``torch.fx`` among the arguments of others, which PyTorch's types allow to be almost anything."""

from __future__ import annotations

from torch import fx


def node_argument(node: fx.Node, position: int) -> fx.Node:
    """An argument that is known to be a node."""
    argument = node.args[position]
    assert isinstance(argument, fx.Node)
    return argument


def block_of(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """The module that a ``get_attr`` or ``call_module`` node, known to name one, stands for."""
    block = getattr(module, str(node.target))
    assert isinstance(block, fx.GraphModule)
    return block
