"""Linear layers for which a model folds samples and places into one dim, and unfolds them afterwards.

``torch.nn.MultiheadAttention`` projects its output, [length, samples, features], as rows of a matrix,
[length * samples, features]. A cut between samples is no cut of these rows, so every rank would compute them
all. A linear layer takes a tensor of any number of dims, and gives the same rows.
"""

from __future__ import annotations

from math import prod

from ...lang.ir import Graph, Node, Ref, users_of
from .build import Builder, rewrite


def linears_without_folding(graph: Graph) -> Graph:
    """Applies a linear layer to what was folded for it, if its result is only unfolded."""
    unfolding = _unfolding_views(graph)
    instead: dict[str, Ref] = {}  # by result of a view that unfolds: the same without folding

    def linear(b: Builder, node: Node) -> tuple[Ref] | None:
        view = unfolding.get(node.result)
        folded = b.producer(Ref(node.inputs[0]))
        if view is None or folded.op != "aten.view":
            return None
        features = folded.types[0].shape[-1]
        x = b("aten.view", folded.args[0], (*view.types[0].shape[:-1], features))
        y = instead[view.result] = b(node.op, x, *node.args[1:], **dict(node.kwargs))
        return (b("aten.view", y, node.types[0].shape),)  # without a use

    def view(b: Builder, node: Node) -> tuple[Ref] | None:
        same = instead.get(node.result)
        return None if same is None else (same,)

    return rewrite(graph, {"aten.linear": linear, "aten.view": view})


def _unfolding_views(graph: Graph) -> dict[str, Node]:
    """By result of a linear layer of rows: its only use, where that gives the rows several dims."""
    users = users_of(graph.nodes)
    layers = [n for n in graph.nodes if n.op == "aten.linear" and len(n.types[0].shape) == 2]
    only = ((n, users[n.result][0]) for n in layers if len(users.get(n.result, ())) == 1)
    return {n.result: view for n, view in only if _unfolds(view, *n.types[0].shape)}


def _unfolds(view: Node, num_rows: int, num_features: int) -> bool:
    """Whether a node gives rows of features several dims in place of one."""
    if view.op != "aten.view":
        return False
    *lead, features = view.types[0].shape
    return len(lead) > 1 and features == num_features and prod(lead) == num_rows
