"""Rewrites embedding bags to look-ups and sums, which have rules, and look-ups with sparse gradients to
those with dense ones: the same values, which ranks can sum."""

from __future__ import annotations

from ...lang.ir import DType, Node, Ref
from .build import Builder, Rule
from .schema import bound

SUM, MEAN, MAX = 0, 1, 2  # at::native::EmbeddingBagMode


def embedding_bag(b: Builder, node: Node) -> tuple[Ref | None, ...] | None:
    """Rewrites bags of equal length (a batch of index rows) to an embedding, and the sum, mean or maximum of
    each bag.

    Entries of ``padding_idx`` do not count. Bags whose offsets are data stay one operator, with a dense
    gradient.
    """
    arg = bound(node)
    weight, ids, padding = arg["weight"], arg["indices"], arg.get("padding_idx")
    padding = -1 if padding is None else padding % b.type(weight).shape[0] if padding >= 0 else padding
    total = b.type(ids).num_elements
    starts = b.producer(arg["offsets"])
    bags = b.type(arg["offsets"]).num_elements
    length = total // bags if bags else 0
    equal = starts.op.startswith("aten.arange") and bags * length == total and starts.args[-1] == length
    if any(r is not None for r in node.results[1:]) or not equal or arg["include_last_offset"]:
        return _with_dense_gradient(b, node)
    if arg["mode"] == MAX and padding >= 0:
        return _with_dense_gradient(b, node)  # the maximum of an empty bag is a special case
    ids = b("aten.view", ids, (bags, length))
    rows = b("aten.embedding", weight, ids, padding, arg["scale_grad_by_freq"])
    if arg["per_sample_weights"] is not None:
        factor = b("aten.view", arg["per_sample_weights"], (bags, length, 1))
        rows = b("aten.mul.Tensor", rows, factor)
    counted = None
    if padding >= 0:
        counted = b("aten._to_copy", b("aten.ne.Scalar", ids, padding), dtype=DType(b.type(rows).dtype))
        rows = b("aten.mul.Tensor", rows, b("aten.unsqueeze", counted, -1))
    return (_pooled(b, arg["mode"], rows, counted), *(None,) * (len(node.results) - 1))


def _with_dense_gradient(b: Builder, node: Node) -> tuple[Ref | None, ...] | None:
    arg = bound(node)
    if not arg["sparse"]:
        return None
    refs = b.all(node.op, *(arg | {"sparse": False}).values())
    return tuple(None if result is None else ref for result, ref in zip(node.results, refs))


def _pooled(b: Builder, mode: int, rows: Ref, counted: Ref | None) -> Ref:
    """The sum, mean or maximum over dim 1 of those ``rows`` that ``counted`` marks; None marks all."""
    if mode == MAX:
        return b("aten.max.dim", rows, 1)
    if mode == MEAN and counted is None:
        return b("aten.mean.dim", rows, (1,))
    total = b("aten.sum.dim_IntList", rows, (1,))
    if mode == SUM or counted is None:
        return total
    count = b("aten.clamp_min", b("aten.sum.dim_IntList", counted, (1,), True), 1)
    return b("aten.div.Tensor", total, count)


def embedding(b: Builder, node: Node) -> tuple[Ref] | None:
    arg = bound(node)
    if not arg["sparse"]:
        return None
    return (
        b("aten.embedding", arg["weight"], arg["indices"], arg["padding_idx"], arg["scale_grad_by_freq"]),
    )


LOOKUP_RULES: dict[str, Rule] = {
    "aten.embedding": embedding,
    **{
        f"aten.{name}": embedding_bag
        for name in (
            "embedding_bag",
            "embedding_bag.padding_idx",
            "_embedding_bag",
            "_embedding_bag_forward_only",
        )
    },
}
