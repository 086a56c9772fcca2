"""``no_grad`` and ``autocast`` blocks of an exported program.

Export keeps such a block as one higher-order operator, and decomposing merely inlines it: gradients would
flow through ``no_grad`` again, and the lines of the user's file would be lost. So blocks are inlined here
first, with a ``detach`` on everything that enters a ``no_grad`` block, but none on what leaves it as the same
tensor. An enabled ``autocast`` block stays, because decomposing inserts its casts, and so does a block within
it that casts nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx
from torch._export.passes import replace_set_grad_with_hop_pass as grad_pass
from torch.amp.autocast_mode import _enter_autocast

from ...base.patch import patched
from .fx_nodes import block_of, node_argument
from .same_tensors import AUTOCAST, itself

SET_GRAD = "wrap_with_set_grad_enabled"


def no_grad_within_autocast() -> AbstractContextManager[None]:
    """A context in which export keeps a ``no_grad`` block inside an ``autocast`` block. PyTorch recognises a
    ``no_grad`` block by its first node, which there is the ``autocast``: without this, gradients would flow
    through."""

    def is_block(node: fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
        if node.op != "call_module" or node.graph.owning_module is None:
            return False
        nodes = block_of(node.graph.owning_module, node).graph.nodes
        first = next((n for n in nodes if n.op != "placeholder" and n.target is not _enter_autocast), None)
        if first is None or first.target is not torch._C._set_grad_enabled:
            return False
        return not omit_if_same_with_ambient or first.args[0] != torch.is_grad_enabled()

    return patched(grad_pass, "_is_set_grad_enabled_sub_mod", is_block)


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """A context in which an ``inference_mode`` block is exported as a ``no_grad`` block. Export does not see
    the former: gradients would flow through."""
    before: list[bool] = []

    def enter(self: torch.inference_mode) -> None:
        before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(not self.mode)

    def leave(self: torch.inference_mode, *_: Any) -> None:
        torch.set_grad_enabled(before.pop())

    with patched(torch.inference_mode, "__enter__", enter), patched(torch.inference_mode, "__exit__", leave):
        yield


def inline_regions(module: fx.GraphModule, *, casts: bool = False) -> None:
    """Replaces blocks by their contents, in place and at every depth. A disabled ``autocast`` block stays too
    where an enabled one around it ``casts``: its operators are not to be cast."""
    is_changed = False
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        at = {SET_GRAD: 1, AUTOCAST: 4}.get(node.target.name())
        if at is None:
            continue
        block = block_of(module, node_argument(node, at))
        is_autocast = node.target.name() == AUTOCAST
        inline_regions(block, casts=bool(node.args[2]) if is_autocast else casts)
        is_changed = True
        if not is_autocast:
            _inline(module, node, block, node.args[at + 1 :], detach=not node.args[0])
        elif not (node.args[2] or casts):
            _inline(module, node, block, node.args[at + 1 :], detach=False)
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
            is_changed = True
    if is_changed:
        module.recompile()


def _inline(
    module: fx.GraphModule, node: fx.Node, block: fx.GraphModule, args: Sequence[Any], detach: bool
) -> None:
    copies: dict[fx.Node, Any] = {}
    given: dict[fx.Node, Any] = {}  # the outer values that inner ones are, without a detach between them
    arguments = iter(args)
    outputs: Any = ()
    with module.graph.inserting_before(node):
        for inner in block.graph.nodes:
            if inner.op == "placeholder":
                outer = given[inner] = next(arguments)
                copies[inner] = _detached(module.graph, outer) if detach else outer
            elif inner.op == "output":
                outputs = inner.args[0]
            else:
                copies[inner] = module.graph.node_copy(inner, lambda n: copies[n])
                if detach and (same := itself(inner)) in given:
                    given[inner] = given[same]
                if inner.op == "get_attr":
                    copies[inner].target = _adopt(
                        module, getattr(block, str(inner.target)), str(inner.target)
                    )
    for user in list(node.users):
        index: Any = user.args[1]
        if user.target is not operator.getitem:
            raise NotImplementedError(f"{node.target} is used whole")
        result = outputs[index]
        user.replace_all_uses_with(given.get(result, copies[result]))
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Returns a detached copy of a tensor that may have a gradient; any other value itself."""
    example = value.meta.get("val")
    if not isinstance(example, torch.Tensor) or not (example.is_floating_point() or example.is_complex()):
        return value
    copy = graph.call_function(torch.ops.aten.detach.default, (value,))
    copy.meta = {k: v for k, v in value.meta.items() if k in ("val", "stack_trace")}
    return copy


def _adopt(module: fx.GraphModule, block: torch.nn.Module, name: str) -> str:
    """Adds a submodule under a free name that begins with ``name``, and returns the name."""
    free_name = name
    while free_name in module._modules:
        free_name += "_"
    module.add_module(free_name, block)
    return free_name
