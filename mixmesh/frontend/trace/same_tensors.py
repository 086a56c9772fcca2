"""Operators that return their argument itself, as ``x.float()`` does in float32.

Export takes their results for new values, and all later users of the argument for users of these. In a
``no_grad`` block that would stop the gradient of the argument, for the rest of the forward pass.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .fx_nodes import block_of, node_argument

AUTOCAST = "wrap_with_autocast"


def itself(node: fx.Node) -> fx.Node | None:
    """The argument that is the same tensor as the result of ``node``. None if the result is a new one, or was
    written to."""
    if node.target is not operator.getitem:
        return _argument(node)
    made, index = node_argument(node, 0), node.args[1]
    if isinstance(made.target, torch._ops.HigherOrderOperator):
        return _through_block(made, index) if made.target.name() == AUTOCAST else None
    return _argument(made, index)


def _argument(node: fx.Node, index: Any = None) -> fx.Node | None:
    """The argument that is the result of ``node``, or the one with this ``index`` among its results."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    examples = {n: n.meta.get("val") for n in node.all_input_nodes}
    if not target._can_decompose() or not all(isinstance(x, torch.Tensor) for x in examples.values()):
        return None  # only composite operators return an argument
    args, kwargs = fx.map_arg((node.args, node.kwargs), examples.__getitem__)
    with torch.no_grad():
        result = target(*args, **kwargs)
    if index is not None:
        result = result[index]
    return next((n for n, x in examples.items() if x is result), None)


def contents_of(node: fx.Node) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
    """The contents of an ``autocast`` block, and the argument of the block that each placeholder stands
    for."""
    module = node.graph.owning_module
    assert module is not None
    block = block_of(module, node_argument(node, 4))
    return block, dict(zip(block.graph.find_nodes(op="placeholder"), node.args[5:]))


def _through_block(node: fx.Node, index: Any) -> fx.Node | None:
    """The argument of an ``autocast`` block that leaves it as the result with this ``index``."""
    block, held = contents_of(node)
    inner: Any = block.graph.output_node().args[0]
    inner = inner[index]
    while isinstance(inner, fx.Node) and inner not in held:
        inner = itself(inner)
    return held.get(inner)
