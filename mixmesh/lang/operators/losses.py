"""Cross entropy in two operators, so that its classes may be cut.

``sum_exp`` sums the exponentials of every row's logits; where classes are cut these are partial sums, and one
all-reduce completes them. ``cross_entropy`` is then local: a rank adds the part of its own classes, and its
gradient is softmax minus target there. Only these sums travel, once per step; Megatron-LM (Shoeybi et al.,
2019, section 3) sends a maximum, a sum and a logit.

The sums are f64 and of the logits themselves, not of their differences to a maximum that ranks would have to
agree on first: in f64, exp is finite up to 709 and above zero from -745 on. Within a piece, differences to
its own maximum are summed. Whole rows have no such limits (``_positive``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .pieces import PIECE_BYTES, wide

NONE, SUM = 0, 2  # at::Reduction
# up to these logarithms a sum is stored as its exponential; a sum over ranks can be e^10 times its largest
# addend
EDGE, EDGE_OF_PART = 600.0, 590.0
GPU_PIECE_BYTES = 2**27  # for a GPU: only a few pieces, because each costs some launches


def _check(x: Tensor, *of_rows: Tensor) -> None:
    if x.ndim < 2 or not x.is_floating_point():
        raise RuntimeError(
            f"cross entropy wants floating-point logits [N, C, ...], not {x.dtype} {list(x.shape)}"
        )
    rows = (x.shape[0], *x.shape[2:])
    for t in of_rows:
        if tuple(t.shape) != rows:
            raise RuntimeError(f"{list(rows)} wanted for logits {list(x.shape)}, not {list(t.shape)}")


def _pieces(x: Tensor) -> int:
    """The number of samples of ``x`` to work on at a time."""
    piece = GPU_PIECE_BYTES if x.is_cuda else PIECE_BYTES
    each = x.numel() * wide(x).itemsize // max(len(x), 1)
    return max(1, piece // max(each, 1))


# --- sums of exponentials ------------------------------------------------------------------------------


def _log_sums(x: Tensor) -> Tensor:
    """The logarithms of the sums of exponentials over dim 1: f64 [N, ...]."""
    rows = _pieces(x)
    work = x.new_empty((min(rows, len(x)), *x.shape[1:]), dtype=wide(x))
    if not x.is_cuda:  # on a CPU a piece stays in the cache between its passes
        parts = [_top_and_total(piece, work) for piece in x.split(rows)]
        top = torch.cat([top for top, _ in parts])
        totals = [total for _, total in parts]
    else:
        top = _top(x, work.dtype)
        totals = [_total(piece, own, work) for piece, own in zip(x.split(rows), top.split(rows))]
    return torch.cat(totals).double().log_().add_(top.squeeze(1))


def _top(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest logit of every row, and 0 where all classes are masked out."""
    top = x.amax(1, keepdim=True).to(dtype)
    return top.masked_fill_(top == -math.inf, 0.0)


def _total(x: Tensor, top: Tensor, work: Tensor) -> Tensor:
    return torch.sub(x, top, out=work[: len(x)]).exp_().sum(1)


def _top_and_total(x: Tensor, work: Tensor) -> tuple[Tensor, Tensor]:
    top = _top(x, work.dtype)
    return top, _total(x, top, work)


def _positive(logs: Tensor) -> Tensor:
    """exp between -EDGE and EDGE; above that a linear function, below it the inverse of one, so that the sum
    of no f32 logits overflows or vanishes."""
    beyond = (logs - EDGE).clamp_(min=0).add_(1)
    below = (-EDGE - logs).clamp_(min=0).add_(1)
    return logs.clamp(-EDGE, EDGE).exp_().mul_(beyond).div_(below)


def _log(sums: Tensor) -> Tensor:
    """The inverse of ``_positive``; infinite if a sum over ranks is infinite (``sum_exp_of_part``)."""
    large = math.exp(EDGE)
    logs = sums.log()
    logs = torch.where(sums > large, EDGE - 1 + sums / large, logs)
    return torch.where(sums < 1 / large, 1 - EDGE - 1 / (sums * large), logs)


@torch.no_grad()
def sum_exp(x: Tensor) -> Tensor:
    """Sums the exponentials of logits ``x`` [N, C, ...] over their classes: f64 [N, ...]. It has no gradient:
    that of ``cross_entropy`` is complete. Where f64 cannot hold a sum, the result encodes its logarithm
    (``_positive``)."""
    _check(x)
    if x.is_meta or not x.numel():
        return x.new_zeros((x.shape[0], *x.shape[2:]), dtype=torch.float64)
    return _positive(_log_sums(x))


@torch.no_grad()
def sum_exp_of_part(x: Tensor) -> Tensor:
    """Like ``sum_exp``, for some of the classes; the results of all parts are then summed. A sum above e^590
    becomes infinite, and so does the loss; one below e^-590 becomes zero."""
    logs = _log_sums(x)
    sums = logs.exp()
    return sums.masked_fill_(logs > EDGE_OF_PART, math.inf).masked_fill_(logs < -EDGE_OF_PART, 0.0)


# --- the loss ------------------------------------------------------------------------------------------


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of a part of the classes: ``x`` holds those from ``first`` on, out of ``num_classes``."""

    @staticmethod
    def forward(ctx, x, sums, target, reduction, ignore_index, label_smoothing, first, num_classes):
        logs = _log(sums)
        counts = target != ignore_index
        target = target.long()
        label = torch.where(counts, target, first)  # the ignored label may lie outside of the classes
        if first or x.shape[1] < num_classes:
            fits = (label >= 0) & (label < num_classes)
            torch._assert_async(fits.all(), f"a target is none of {num_classes} classes")
            label = label - first
            own = counts & (label >= 0) & (label < x.shape[1])
            label.clamp_(0, x.shape[1] - 1)
        else:
            own = counts
        picked = x.gather(1, label.unsqueeze(1)).squeeze(1)
        rows = torch.where(own, logs - picked, 0.0).mul_(1 - label_smoothing)
        if label_smoothing:
            others = logs * x.shape[1] - x.sum(1, dtype=torch.float64)
            rows += torch.where(counts, others, 0.0).mul_(label_smoothing / num_classes)
        ctx.save_for_backward(x, logs, counts, own, label)
        ctx.smoothing = label_smoothing, num_classes
        return (rows.sum() if reduction == SUM else rows).to(wide(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, logs, counts, own, label = ctx.saved_tensors
        smoothing, num_classes = ctx.smoothing
        dx = torch.empty_like(x)
        g = torch.where(counts, grad, 0.0)
        # exp(x - log) is the softmax; the difference corrects for rounding the logarithm to the dtype of x
        near = logs.to(g.dtype)
        scale = (near - logs).exp_().to(g.dtype).mul_(g)
        share = smoothing / num_classes
        rows = _pieces(x)
        of_rows = [t.unsqueeze(1).split(rows) for t in (near, scale, g)]
        for piece, out, shift, factor, each in zip(x.split(rows), dx.split(rows), *of_rows):
            weights = torch.sub(piece, shift, out=out if piece.dtype == g.dtype else None).exp_()
            if smoothing:
                out.copy_(weights.mul_(factor).sub_(each * share))
            else:
                torch.mul(weights, factor, out=out)
        # at the label two addends may nearly cancel: they are added before they are rounded
        place = label.unsqueeze(1)
        softmax = (x.gather(1, place).squeeze(1) - logs).exp_().to(g.dtype)
        at_label = softmax.sub_(share).mul_(g).add_(g * own * (smoothing - 1))
        dx.scatter_(1, place, at_label.to(dx.dtype).unsqueeze(1))
        return dx, *[None] * 7


def cross_entropy(
    x: Tensor, sums: Tensor, target: Tensor, reduction: int, ignore_index: int, label_smoothing: float
) -> Tensor:
    """torch.nn.functional.cross_entropy of logits ``x`` [N, C, ...] with their ``sum_exp``. ``reduction`` is
    ATen's number: the sum, or the loss of every row. The result is f32 or wider."""
    return cross_entropy_of_part(x, sums, target, reduction, ignore_index, label_smoothing, 0, x.shape[1])


def cross_entropy_of_part(
    x: Tensor, sums: Tensor, target: Tensor, reduction: int, ignore_index: int, label_smoothing: float,
    first: int, num_classes: int,
) -> Tensor:  # fmt: skip
    """The part of ``cross_entropy`` that belongs to the classes of ``x``, which begin at ``first``. ``sums``
    are over all ``num_classes``, and ``target`` counts from the first of all."""
    _check(x, sums, target)
    if reduction not in (NONE, SUM):
        raise RuntimeError(f"a sum or the loss of every row, not reduction {reduction}")
    if x.is_meta:
        return x.new_empty(() if reduction == SUM else target.shape, dtype=wide(x))
    return _CrossEntropy.apply(x, sums, target, reduction, ignore_index, label_smoothing, first, num_classes)


SCHEMAS = (
    ("sum_exp(Tensor x) -> Tensor", sum_exp),
    (
        "cross_entropy(Tensor x, Tensor sums, Tensor target, int reduction, int ignore_index,"
        " float label_smoothing) -> Tensor",
        cross_entropy,
    ),
)
