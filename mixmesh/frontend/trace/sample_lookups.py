"""Rewrites ``x[torch.arange(len(x)), columns]``, which picks in each row of ``x`` or writes to it, so that
rows stay apart: ranks then need no rows of each other, and micro-batches none of other samples.

Padding masks of transformers and the pooling of a last token are written so. Models of sound mark the end of
each sample by such a write.
"""

from __future__ import annotations

from math import prod

from ...lang.ir import Node, Ref
from .build import Builder, Rule
from .schema import bound

ARANGES = ("aten.arange", "aten.arange.start", "aten.arange.start_step")
RESHAPES = ("aten.unsqueeze", "aten.view")  # those that keep the order of elements


def index(b: Builder, node: Node) -> tuple[Ref] | None:
    """Rewrites two indices, of which the first counts the rows, to one index of columns that all rows share,
    or else to ``gather``."""
    x, indices = node.args
    while indices and indices[-1] is None:
        indices = indices[:-1]
    if len(indices) != 2 or not all(isinstance(each, Ref) for each in indices):
        return None
    rows, columns = indices
    size = b.type(x).shape[0]
    counts, picks = b.type(rows).shape, b.type(columns).shape
    if not _counts(b, rows) or counts != (size, *counts[1:]) or prod(counts[1:]) != 1:
        return None
    if b.type(columns).dtype != "i64" or not 0 < len(picks) <= len(counts):
        return None
    shared = len(picks) < len(counts) or picks[0] == 1 and (size > 1 or _counts(b, columns))
    return (_by_shared(b, node, columns) if shared else _by_own(b, node, columns),)


def index_put(b: Builder, node: Node) -> tuple[Ref] | None:
    """Rewrites a write to one entry of each row, ``x[torch.arange(len(x)), columns] = values``, to
    ``scatter``."""
    x, indices, values, *adds = node.args
    if any(adds) or len(indices) != 2 or not all(isinstance(each, Ref) for each in indices):
        return None
    rows, columns = indices
    size, _, *inner = b.type(x).shape
    if not _counts(b, rows) or b.type(columns) != b.type(rows) or b.type(rows).shape != (size,):
        return None
    written = b("aten.view", b("aten.expand", values, (size, *inner)), (size, 1, *inner))
    return (b("aten.scatter.src", x, 1, _of_each(b, columns, x), written),)


def _by_shared(b: Builder, node: Node, columns: Ref) -> Ref:
    """Every row's entries at the same ``columns``."""
    x, shape = node.args[0], node.types[0].shape
    length = b.type(x).shape[1]
    if b.type(columns).num_elements == length and _counts(b, columns):
        return b("aten.view", x, shape)  # all of them, in their order
    flat = b("aten.view", columns, (b.type(columns).num_elements,))
    return b("aten.view", b("aten.index.Tensor", x, (None, flat)), shape)


def _by_own(b: Builder, node: Node, columns: Ref) -> Ref:
    """Every row's entries at its own ``columns``, of which negative ones count from the end."""
    x, shape = node.args[0], node.types[0].shape
    return b("aten.view", b("aten.gather", x, 1, _of_each(b, columns, x)), shape)


def _of_each(b: Builder, columns: Ref, x: Ref) -> Ref:
    """The places of the rows' own ``columns`` along the second dim of ``x``, for all its further dims."""
    length, *inner = b.type(x).shape[1:]
    size, *more = b.type(columns).shape
    from_end = b("aten.lt.Scalar", columns, 0)
    columns = b("aten.where.self", from_end, b("aten.add.Tensor", columns, length), columns)
    columns = b("aten.view", columns, (size, prod(more), *[1] * len(inner)))
    return b("aten.expand", columns, (size, prod(more), *inner))


def _counts(b: Builder, x: Ref) -> bool:
    """Whether the elements of a value are 0, 1, 2 and so on, in their order."""
    node = b.producer(x)
    while node.op in RESHAPES:
        node = b.producer(node.args[0])
    if node.op not in ARANGES:
        return False
    arg = bound(node)
    return arg.get("start", 0) == 0 and arg.get("step", 1) == 1


SAMPLE_RULES: dict[str, Rule] = {"aten.index.Tensor": index, "aten.index_put": index_put}
