"""Products that PyTorch has for narrow dtypes only, in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype=None
) -> Tensor:
    """aten._grouped_mm: products of groups, which end at ``offs`` in the dim of ``a`` and ``b`` that has no
    dim of groups beside it (rows of ``a``, columns of ``b``, or what is summed over). Raises RuntimeError for
    a bias, which PyTorch 2.13 does not take either."""
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
