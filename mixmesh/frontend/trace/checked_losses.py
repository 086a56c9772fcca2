"""``gaussian_nll_loss`` while a model is exported.

It raises an error for a negative variance, which needs the values, and clamps variances in place under
``no_grad``, so that their gradient passes. Here it is the same loss without the write, and NaN in place of
the error: no rank can raise one alone, and a loss that is NaN is seen on all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """The loss of ``torch.nn.functional.gaussian_nll_loss``: variances of less than ``eps`` count as ``eps``,
    with the gradient of themselves, and a negative one makes it NaN. Shapes, and errors for wrong ones, are
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
    return {"none": lambda: loss, "mean": loss.mean, "sum": loss.sum}[reduction]()


STAND_INS: dict[Callable, Callable] = {F.gaussian_nll_loss: gaussian_nll_loss}


class LossesWithoutChecks(TorchFunctionMode):
    """Within it the functions in ``STAND_INS`` are computed by what stands there."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return STAND_INS.get(func, func)(*args, **(kwargs or {}))
