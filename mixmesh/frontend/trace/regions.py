"""Regions of an exported program: ``no_grad`` and ``autocast`` blocks.

Export keeps such a block as one higher-order operator, and decomposing merely inlines it: the gradients
that ``no_grad`` stops would flow again, and the lines of the user's file are lost. So blocks are inlined
here first: what enters a ``no_grad`` block is detached. An enabled ``autocast`` block stays, because its
casts are made by decomposing inside it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch._export.passes import replace_set_grad_with_hop_pass as grad_pass
from torch.amp.autocast_mode import _enter_autocast

SET_GRAD = "wrap_with_set_grad_enabled"
AUTOCAST = "wrap_with_autocast"


@contextmanager
def no_grad_within_autocast() -> Iterator[None]:
    """Has export keep a ``no_grad`` block that stands in an ``autocast`` block. PyTorch knows a part of a
    graph as such a block by its first node, which is there the ``autocast`` that the part is put under: it
    takes the part for an ordinary one, and the gradients that ``no_grad`` stops would flow."""
    original = grad_pass._is_set_grad_enabled_sub_mod

    def is_block(node: fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
        if node.op != "call_module":
            return False
        nodes = getattr(node.graph.owning_module, node.target).graph.nodes
        first = next((n for n in nodes if n.op != "placeholder" and n.target is not _enter_autocast), None)
        if first is None or first.target is not torch._C._set_grad_enabled:
            return False
        return not omit_if_same_with_ambient or first.args[0] != torch.is_grad_enabled()

    grad_pass._is_set_grad_enabled_sub_mod = is_block
    try:
        yield
    finally:
        grad_pass._is_set_grad_enabled_sub_mod = original


def inline_regions(module: fx.GraphModule) -> None:
    """Replace blocks by their contents, in place, at every depth."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        at = {SET_GRAD: 1, AUTOCAST: 4}.get(node.target.name())
        if at is None:
            continue
        block = getattr(module, node.args[at].target)
        inline_regions(block)
        if node.target.name() == SET_GRAD:
            _inline(module, node, block, node.args[at + 1 :], detach=not node.args[0])
        elif not node.args[2]:  # autocast, disabled
            _inline(module, node, block, node.args[at + 1 :], detach=False)
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
    module.recompile()


def _inline(module: fx.GraphModule, node: fx.Node, block: fx.GraphModule, args, detach: bool) -> None:
    copies: dict[fx.Node, object] = {}
    arguments = iter(args)
    outputs: tuple = ()
    with module.graph.inserting_before(node):
        for inner in block.graph.nodes:
            if inner.op == "placeholder":
                outer = next(arguments)
                copies[inner] = _detached(module.graph, outer) if detach else outer
            elif inner.op == "output":
                outputs = inner.args[0]
            else:
                copies[inner] = module.graph.node_copy(inner, lambda n: copies[n])
                if inner.op == "get_attr":
                    copies[inner].target = _adopt(module, getattr(block, inner.target), inner.target)
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise NotImplementedError(f"{node.target.name()} is used whole")
        user.replace_all_uses_with(copies.get(outputs[user.args[1]]))
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    example = value.meta.get("val")
    if not isinstance(example, torch.Tensor) or not example.dtype.is_floating_point:
        return value
    copy = graph.call_function(torch.ops.aten.detach.default, (value,))
    copy.meta = {k: v for k, v in value.meta.items() if k in ("val", "stack_trace")}
    return copy


def _adopt(module: fx.GraphModule, block: torch.nn.Module, name: str) -> str:
    free_name = name
    while free_name in module._modules:
        free_name += "_"
    module.add_module(free_name, block)
    return free_name
