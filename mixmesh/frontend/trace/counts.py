"""Export of ``torch.bincount``, whose result has as many numbers as its values say."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .selected import is_selected


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Computes ``torch.bincount`` of values below ``minlength``. Another value, for which PyTorch's result
    is longer, raises an error when the program runs. Without ``minlength`` nothing says how long the result
    is."""
    is_of_rows = is_selected(input)
    if not minlength or (is_of_rows or is_selected(weights)) and weights is not None:
        return torch.bincount(input, weights, minlength)
    if weights is None:
        addends = torch.ones_like(input, dtype=torch.int64)
    else:
        addends = weights.detach() if weights.dtype is torch.float32 else weights.detach().double()
    if is_of_rows:  # those that the mask does not select add zeros to the first
        input, addends = (x.filled(0).reshape(-1) for x in (input, addends))  # type: ignore[attr-defined]
    zeros = torch.zeros(minlength, dtype=addends.dtype, device=input.device)
    return zeros.index_add(0, input.long(), addends)


STAND_INS: dict[Callable, Callable] = {torch.bincount: bincount, Tensor.bincount: bincount}
