"""Export of writes in place whose functional form would have wrong gradients, or could not be cut.

A write to ``x.as_strided(...)`` becomes ``as_strided_scatter``. In the backward pass of this operator,
PyTorch 2.13 keeps the gradient where values were written, and drops it elsewhere; it should be the
other way round. Here such a write is a scatter by index. ``x.fill_diagonal_`` is such a write too; by a mask
it is one that can also be cut. ``x[mask] = value``, with one value for all places, becomes a choice by the
mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram


def fill_diagonal_(x: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    """Computes ``x.fill_diagonal_(fill_value, wrap)``; a matrix ``[m, n]`` is filled by a mask."""
    if x.ndim != 2 or wrap:
        return x.fill_diagonal_(fill_value, wrap)
    return x.masked_fill_(torch.eye(*x.shape, dtype=torch.bool, device=x.device), fill_value)


def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    """Computes ``torch.as_strided_scatter`` by index. A tensor that is not contiguous keeps the operator,
    which raises an error if the tensor has a gradient."""
    if not x.is_contiguous():
        return NotImplemented
    start = int(x.storage_offset())
    end = start + x.numel()
    offset = start if offset is None else offset
    places = torch.arange(end, device=x.device).as_strided(size, stride, offset) - start
    return x.reshape(-1).scatter(0, places.reshape(-1), source.reshape(-1)).reshape(x.shape)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Computes ``torch.index_put`` by a choice, if the index is a mask and the same values go everywhere."""
    places = [place for place, index in enumerate(indices) if index is not None]
    mask = indices[places[0]] if len(places) == 1 else None
    if mask is None or mask.dtype is not torch.bool:
        return NotImplemented
    behind = x.ndim - places[0] - mask.ndim
    if values.numel() == 1:
        values = values.reshape(())
    if values.ndim > behind:
        return NotImplemented
    chosen = mask.reshape(*mask.shape, *([1] * behind))
    values = values.to(x.dtype)
    return torch.where(chosen, x + values if accumulate else values, x)


def write_decompositions(program: ExportedProgram) -> dict[Any, Callable]:
    """The decompositions of writes in ``program``, which is not yet in functional form. A model that calls
    ``as_strided_scatter`` itself keeps the gradients that it has on one device."""
    op = torch.ops.aten.as_strided_scatter.default
    is_own = any(node.target is op for node in program.graph.nodes)
    masked = {torch.ops.aten.index_put.default: index_put}
    return masked if is_own else {op: as_strided_scatter, **masked}


STAND_INS: dict[Callable, Callable] = {Tensor.fill_diagonal_: fill_diagonal_}
