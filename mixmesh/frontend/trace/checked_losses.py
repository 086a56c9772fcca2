"""Export of ``gaussian_nll_loss``.

PyTorch's function raises an error for a negative variance, which needs values, and clamps variances in place
under ``no_grad``, which keeps their gradient. This one computes the same loss without the in-place write, and
gives NaN instead of the error: a rank cannot raise an error alone, but all ranks see a loss that is NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Computes ``torch.nn.functional.gaussian_nll_loss``: a variance below ``eps`` counts as ``eps`` but
    keeps its own gradient, and a negative one makes the loss NaN. Shapes, and errors for wrong ones, are
    those of PyTorch's function."""
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)
    if var.shape != input.shape:
        num_others = sum(a != b for a, b in zip(input.shape, var.shape))
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif var.ndim != input.ndim or num_others != 1:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    values = var.detach()
    clamped = values.clamp(min=eps).masked_fill(values < 0, math.nan) + (var - values)
    loss = 0.5 * (torch.log(clamped) + (input - target) ** 2 / clamped)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()
