"""Masks that a forward pass makes of shapes and constants alone, as ``~torch.eye(n, dtype=torch.bool)``: what
they select is known when the pass is exported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree

from .fx_nodes import slot_of
from .written import DETACH_IN_PLACE, sharing_with_written

MOST_SELECTED = 2**16  # numbers that a program keeps for one mask


def numbers_selected(mask: Tensor) -> list[Tensor] | None:
    """The numbers that a mask selects, along each of its dims, if they follow from shapes and constants; else
    None, as for a mask of a batch's values, or of sizes that are symbols."""
    slot = slot_of(mask)
    if slot is None or mask.dtype is not torch.bool or mask.ndim == 0:
        return None
    node = slot.proxy.node
    if (made_by := _makers(node)) is None:
        return None
    with unset_fake_temporarily(), dispatch._disable_current_modes(), torch.no_grad():
        values: dict[fx.Node, Any] = {}
        for each in made_by:
            if each.op == "get_attr":
                values[each] = getattr(slot.proxy.tracer.root, str(each.target))
            else:
                args, kwargs = fx.node.map_arg((each.args, dict(each.kwargs)), values.__getitem__)
                values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
        places = [numbers.tolist() for numbers in values[node].nonzero().unbind(1)]
    if len(places[0]) > MOST_SELECTED:
        return None
    return [torch.tensor(numbers, dtype=torch.long, device=mask.device) for numbers in places]


def _makers(last: fx.Node) -> list[fx.Node] | None:
    """The nodes that compute a value, in order; None if one of them is no function of constants, or shares
    memory with what is written."""
    makers: set[fx.Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if node in makers:
            continue
        if not _is_of_constants(node):
            return None
        makers.add(node)
        waiting += node.all_input_nodes
    return sorted(makers) if makers.isdisjoint(sharing_with_written(last.graph)) else None


def _is_of_constants(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return isinstance(node.target, str) and "." not in node.target
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    is_written = target._schema.is_mutable and target is not DETACH_IN_PLACE
    if is_written or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return not any(isinstance(x, torch.SymInt) for x in pytree.tree_leaves((node.args, dict(node.kwargs))))
