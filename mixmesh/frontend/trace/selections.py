"""The targets of a CTC loss that a mask selects from rows, which PyTorch puts into one row of unknown length.

``ctc_loss(scores, labels[mask], lengths, mask.sum(-1))`` reads of every sample as many targets as its row of
the mask selects. Given the rows themselves, each with what is selected first, it reads the same, and shapes
stay known.
"""

from __future__ import annotations

import torch
from torch import fx

from ...errors import TraceError
from .locate import place_of_stack

aten = torch.ops.aten
SELECT = (aten.masked_select.default, aten.index.Tensor)
# export says this of a length that it does not know
SIZES = (
    aten.sym_size.int, aten._assert_scalar.default, aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
)  # fmt: skip


def targets_by_sample(module: fx.GraphModule) -> None:
    """Replaces such targets, in place. All else that selects by a mask stays. Raises TraceError for targets
    of unknown length that are made in another way."""
    for node in list(module.graph.nodes):
        if node.target is not aten.ctc_loss.Tensor or _is_known(node.args[1]):
            continue
        selected = node.args[1]
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
    module.recompile()


def _is_known(targets: fx.Node) -> bool:
    return all(type(size) is int for size in targets.meta["val"].shape)


def _selected(targets: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The rows and the mask that targets were selected with."""
    if targets.target not in SELECT:
        return None
    rows, mask = targets.args[:2]
    if isinstance(mask, list | tuple):
        if len(mask) != 1:
            return None
        (mask,) = mask
    values = [n.meta.get("val") for n in (rows, mask) if isinstance(n, fx.Node)]
    fits = len(values) == 2 and values[0].ndim == 2 and values[0].shape == values[1].shape
    return (rows, mask) if fits and values[1].dtype == torch.bool else None


def _counts(lengths: fx.Node, mask: fx.Node) -> bool:
    """Whether lengths are how many each row of a mask selects."""
    return (
        isinstance(lengths, fx.Node)
        and lengths.target is aten.sum.dim_IntList
        and lengths.args[0] is mask
        and list(lengths.args[1]) in ([-1], [1])
        and len(lengths.args) < 3
    )


def _selected_first(graph: fx.Graph, rows: fx.Node, mask: fx.Node) -> fx.Node:
    def call(op, *args, **kwargs) -> fx.Node:
        new = graph.call_function(op, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        new.meta = {"val": op(*values[0], **values[1]), "stack_trace": rows.meta.get("stack_trace")}
        return new

    left = call(aten.logical_not.default, mask)
    order = call(aten.argsort.stable, left, stable=True, dim=-1)
    return call(aten.gather.default, rows, 1, order)


def _erase(selected: fx.Node) -> None:
    """Takes away a value that is not used any more, with what is said of its length."""
    users = [selected]
    for node in users:
        users += [user for user in node.users if user not in users]
    if all(_is_about_sizes(node) for node in users[1:]):
        for node in reversed(list(selected.graph.nodes)):
            if node in users:
                selected.graph.erase_node(node)


def _is_about_sizes(node: fx.Node) -> bool:
    return node.target in SIZES or getattr(node.target, "__module__", "") in ("_operator", "math")
