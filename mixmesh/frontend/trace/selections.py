"""Targets of a CTC loss that a mask selects: PyTorch puts them into one row, whose length is data.

``ctc_loss(scores, labels[mask], lengths, mask.sum(-1))`` reads as many targets of every sample as the mask
selects in its row. It reads the same from the rows themselves, if the selected targets come first in each,
and then all shapes are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ...errors import TraceError
from .fx_nodes import node_argument
from .locate import place_of_stack
from .symbolic import is_symbol

aten = torch.ops.aten
SELECT = (aten.masked_select.default, aten.index.Tensor)
# operators that export adds for a length that it does not know
SIZES = (
    aten.sym_size.int, aten._assert_scalar.default, aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
)  # fmt: skip


def targets_by_sample(module: fx.GraphModule) -> None:
    """Replaces such targets in place; other selections by a mask stay. Raises TraceError for targets of
    unknown length that come from another source."""
    is_changed = False
    for node in list(module.graph.nodes):
        if node.target is not aten.ctc_loss.Tensor or _is_known(node_argument(node, 1)):
            continue
        selected = node_argument(node, 1)
        selected_rows = _selected(selected)
        if selected_rows is None or not _counts(node.args[3], selected_rows[1]):
            raise TraceError(
                "the model cannot be traced",
                expected="targets of a CTC loss as [samples, longest], or selected by a mask whose rows are "
                "counted as their lengths: labels[mask] and mask.sum(-1)",
                got=f"targets in one row, of a length known only at run time ({selected.name})",
                where=str(place_of_stack(node.meta.get("stack_trace"))),
                hint="ctc_loss(scores, labels, times, lengths), labels with what counts first in each row",
            )
        with module.graph.inserting_before(node):
            node.update_arg(1, _selected_first(module.graph, *selected_rows))
        _erase(selected)
        is_changed = True
    if is_changed:
        module.recompile()


def _is_known(targets: fx.Node) -> bool:
    return all(type(size) is int or is_symbol(size) for size in targets.meta["val"].shape)


def _selected(targets: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The rows and the mask with which targets were selected, or None."""
    if targets.target not in SELECT:
        return None
    rows, mask = targets.args[:2]
    if isinstance(mask, list | tuple):
        if len(mask) != 1:
            return None
        (mask,) = mask
    if not isinstance(rows, fx.Node) or not isinstance(mask, fx.Node):
        return None
    values, selection = rows.meta["val"], mask.meta["val"]
    fits = values.ndim == 2 and values.shape == selection.shape and selection.dtype == torch.bool
    return (rows, mask) if fits else None


def _counts(lengths: object, mask: fx.Node) -> bool:
    """Whether lengths are the numbers of targets that a mask selects in each row."""
    if not isinstance(lengths, fx.Node) or lengths.target is not aten.sum.dim_IntList:
        return False
    source, dims, *others = lengths.args
    return source is mask and isinstance(dims, Sequence) and list(dims) in ([-1], [1]) and not others


def _selected_first(graph: fx.Graph, rows: fx.Node, mask: fx.Node) -> fx.Node:
    """Builds the rows with their selected values moved to the front."""

    def call(op: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(op, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        new.meta = {"val": op(*values[0], **values[1]), "stack_trace": rows.meta.get("stack_trace")}
        return new

    left = call(aten.logical_not.default, mask)
    order = call(aten.argsort.stable, left, stable=True, dim=-1)
    return call(aten.gather.default, rows, 1, order)


def _erase(selected: fx.Node) -> None:
    """Erases a value that is no longer used, together with the nodes about its length."""
    users = [selected]
    for node in users:
        users += [user for user in node.users if user not in users]
    if all(_is_about_sizes(node) for node in users[1:]):
        for node in reversed(list(selected.graph.nodes)):
            if node in users:
                selected.graph.erase_node(node)


def _is_about_sizes(node: fx.Node) -> bool:
    return node.target in SIZES or getattr(node.target, "__module__", "") in ("_operator", "math")
