"""Rewrites losses to sums and counts, so that each shard of the batch contributes an exact addend."""

from __future__ import annotations

from ...lang.ir import DType, Node, Ref
from .build import Builder, Rule
from .schema import bound, changed

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction
MANY_CLASSES = 1024  # with at least this many, a row's f32 sum has less than 0.2 % of the bytes of its logits
HALF = frozenset({"bf16", "f16", "f8e4m3", "f8e5m2"})


def pointwise_loss(b: Builder, node: Node) -> tuple[Ref] | None:
    """Rewrites a reduced loss to the loss of every element, followed by the mean or sum."""
    reduction = bound(node)["reduction"]
    if reduction == NONE:
        return None
    args, kwargs = changed(node, reduction=NONE)
    return (b("aten.mean" if reduction == MEAN else "aten.sum", b(node.op, *args, **kwargs)),)


def cross_entropy(b: Builder, node: Node) -> tuple[Ref] | None:
    """Rewrites a mean over the targets that count as a sum, divided by their number or their weights.

    With probabilities as targets, every row counts. The smoothed loss has the same denominator as the plain
    one (torch.nn.functional.cross_entropy), so smoothing stays inside the sum.
    """
    arg = bound(node)
    if _has_many_classes(b, arg):
        return (_by_sums(b, arg),)
    if arg["reduction"] != MEAN:
        return None
    x, weight, dtype = _in_f32(b, arg["self"], arg["weight"])
    total = b(node.op, x, arg["target"], weight, SUM, arg["ignore_index"], arg["label_smoothing"])
    if b.type(arg["target"]).is_floating:
        shape = b.type(x).shape
        rows = b.type(x).num_elements // (shape[1] if len(shape) > 1 else shape[0])
        loss = b("aten.div.Tensor", total, float(rows))
    else:
        count = counted(b, arg["target"], weight, arg["ignore_index"], b.type(total).dtype)
        loss = b("aten.div.Tensor", total, count)
    return (cast(b, loss, dtype),)


def _has_many_classes(b: Builder, arg: dict) -> bool:
    """Whether cutting the classes may pay; all labels then have the same weight."""
    shape = b.type(arg["self"]).shape
    labels = not b.type(arg["target"]).is_floating
    return len(shape) > 1 and shape[1] >= MANY_CLASSES and labels and arg["weight"] is None


def _by_sums(b: Builder, arg: dict) -> Ref:
    """The loss in two operators, between which ranks sum over their classes (``operators.losses``)."""
    x, target, ignore_index = arg["self"], arg["target"], arg["ignore_index"]
    reduction = NONE if arg["reduction"] == NONE else SUM
    options = (reduction, ignore_index, arg["label_smoothing"])
    loss = b("mixmesh.cross_entropy", x, b("mixmesh.sum_exp", x), target, *options)
    if arg["reduction"] == MEAN:
        loss = b("aten.div.Tensor", loss, counted(b, target, None, ignore_index, b.type(loss).dtype))
    return cast(b, loss, b.type(x).dtype)


def nll(b: Builder, node: Node) -> tuple[Ref, ...] | None:
    """Like ``cross_entropy``, for all variants of the negative log likelihood."""
    arg = bound(node)
    if arg["reduction"] != MEAN:
        return None
    x, weight, dtype = _in_f32(b, arg["self"], arg["weight"])
    total = b("aten.nll_loss_nd", x, arg["target"], weight, SUM, arg["ignore_index"])
    count = counted(b, arg["target"], weight, arg["ignore_index"], b.type(total).dtype)
    loss = cast(b, b("aten.div.Tensor", total, count), dtype)
    return (loss, cast(b, count, dtype))[: len(node.results)]


def counted(b: Builder, target: Ref, weight: Ref | None, ignore_index: int, dtype: str) -> Ref:
    """The number of targets that are not ignored, or the sum of their weights."""
    valid = b("aten.ne.Scalar", target, ignore_index)
    if weight is None:
        return b("aten._to_copy", b("aten.sum", valid), dtype=DType(dtype))
    # the ignored target may lie outside of the classes: class 0 is looked up instead, and the result dropped
    safe = b("aten.masked_fill.Scalar", target, b("aten.logical_not", valid), 0)
    table = b("aten.view", weight, (*b.type(weight).shape, 1))
    looked_up = b("aten.squeeze.dim", b("aten.embedding", table, safe), -1)
    return b("aten.sum", b("aten.mul.Tensor", looked_up, valid))


def ctc(b: Builder, node: Node) -> tuple[Ref] | None:
    """Rewrites a CTC loss to single samples' losses. A mean divides each by its number of targets and then
    averages; a sum adds them up."""
    arg = bound(node)
    if arg["reduction"] == NONE or not isinstance(arg["target_lengths"], Ref):
        return None
    args, kwargs = changed(node, reduction=NONE)
    each = b(node.op, *args, **kwargs)
    if not b.type(each).shape:
        return None  # a single sample has no dim to cut
    if arg["reduction"] == SUM:
        return (b("aten.sum", each),)
    count = b("aten.clamp_min", arg["target_lengths"], 1)
    count = cast(b, count, b.type(each).dtype)
    return (b("aten.mean", b("aten.div.Tensor", each, count)),)


def _in_f32(b: Builder, x: Ref, weight: Ref | None) -> tuple[Ref, Ref | None, str]:
    """Casts half types to f32: a sum over the batch may overflow them although the mean does not."""
    dtype = b.type(x).dtype
    if dtype not in HALF:
        return x, weight, dtype
    return cast(b, x, "f32"), None if weight is None else cast(b, weight, "f32"), dtype


def cast(b: Builder, x: Ref, dtype: str) -> Ref:
    return x if b.type(x).dtype == dtype else b("aten._to_copy", x, dtype=DType(dtype))


POINTWISE = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss",
    "hinge_embedding_loss", "margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss",
    "multi_margin_loss", "multilabel_margin_loss",
)  # fmt: skip
LOSS_RULES: dict[str, Rule] = {
    "aten.cross_entropy_loss": cross_entropy,
    **{f"aten.{name}": nll for name in (
        "nll_loss", "nll_loss2d", "nll_loss_nd", "nll_loss_forward", "nll_loss2d_forward")},
    "aten.ctc_loss.Tensor": ctc,
    **{f"aten.{name}": pointwise_loss for name in POINTWISE},
}  # fmt: skip
