"""Products in float64 that PyTorch has only for narrower dtypes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes aten._grouped_mm: products of groups, which end at ``offs``. The groups are rows of a 2D
    ``a``, columns of a 2D ``b``, or parts of the summed dim if both are 2D. Raises RuntimeError for a bias,
    as PyTorch 2.13 does too."""
    if bias is not None:
        raise RuntimeError("a product in groups takes no bias")
    if offs is None:
        return torch.bmm(a, b)
    groups = [slice(*ends) for ends in pairwise([0, *offs.tolist()])]
    if a.ndim == b.ndim == 2:
        return torch.stack([a[:, group] @ b[group] for group in groups])
    if a.ndim == 2:
        out = a.new_zeros(len(a), b.shape[-1])
        for group, matrix in zip(groups, b):
            out[group] = a[group] @ matrix
        return out
    out = b.new_zeros(a.shape[1], b.shape[1])
    for group, matrix in zip(groups, a):
        out[:, group] = matrix @ b[:, group]
    return out


IN_FLOAT64: dict[torch._ops.OpOverload, Callable[..., Tensor]] = {
    torch.ops.aten._grouped_mm.default: grouped_mm
}
