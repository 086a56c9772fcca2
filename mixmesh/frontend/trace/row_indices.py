"""Indices of tensors by a mask, or by the numbers that it selects, during an export: ``x[mask]``, ``nonzero``
and what writes to such rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _python_dispatch as dispatch

from .selected import Selected, is_same, is_selected, node_of, wide


def getitem(x: Tensor, index: Any) -> Any:
    """``x[index]``; selected rows if the index is a mask whose values are not known, or selected numbers."""
    if is_selected(x):
        return x[index]
    parts = _parts(index)
    index = parts if isinstance(index, tuple) else parts[0]
    if any(map(is_selected, parts)):
        return _by_selected(x, parts)
    if any(_known_mask(part) is not None for part in parts):
        return x[tuple(number for part in parts for number in _numbers(part))]
    if not _selects(x, parts):
        return x[index]
    selected = selected_rows(x, parts[0])
    return selected[(slice(None), *parts[1:])] if parts[1:] else selected


def _parts(index: Any) -> tuple[Any, ...]:
    """The parts of an index, with bytes as the masks that they stand for."""
    parts = index if isinstance(index, tuple) else (index,)
    are_bytes = [isinstance(part, Tensor) and part.dtype is torch.uint8 for part in parts]
    return tuple(part.bool() if is_bytes else part for part, is_bytes in zip(parts, are_bytes))


def _fits(rows: Selected, x: Tensor) -> bool:
    """Whether selected rows can be written to those of ``x``, perhaps broadcast."""
    if rows.dtype is not x.dtype or rows.values.ndim != x.ndim:
        return False
    return all(size in (1, whole) for size, whole in zip(rows.values.shape, x.shape))


def _by_selected(x: Tensor, parts: tuple[Any, ...]) -> Any:
    """``x`` indexed by selected numbers: those of the rows themselves, other ones, or both."""
    mask = counted_by(x, parts)
    if mask is not None:
        return selected_rows(x, mask)
    first = parts[0]
    if len(parts) == 1 and first.dtype is not torch.bool and first.counts is None:
        return first.of(x[first.places()])
    if len(parts) == 2 and all(map(is_selected, parts)) and parts[1].row_ndim == 0 and x.ndim == 2:
        mask = counted_by(x, parts[:1])  # a column of each row
        if mask is not None and is_same(mask, parts[1].mask):
            rows = selected_rows(x, mask)
            return rows.of(rows.values.gather(1, parts[1].places().unsqueeze(1)).squeeze(1))
    return x[tuple(part.rows() if is_selected(part) else part for part in parts)]


def counted_by(x: Tensor, parts: tuple[Any, ...]) -> Tensor | None:
    """The mask for which ``x[parts]`` are the rows ``x[mask]``, as ``parts`` are the numbers that it
    selects."""
    if not all(is_selected(part) and part.row_ndim == 0 and part.counts == n for n, part in enumerate(parts)):
        return None
    mask = parts[0].mask
    fits = len(parts) == mask.ndim and mask.shape == x.shape[: mask.ndim]
    return mask if fits and all(is_same(mask, part.mask) for part in parts) else None


def nonzero(x: Tensor, **options: Any) -> Any:
    """``torch.nonzero``; of a mask, as selected numbers."""
    as_tuple = options.get("as_tuple", False)
    if options.keys() - {"as_tuple"} or is_selected(x) or not _is_mask(x) or (x.ndim > 1 and not as_tuple):
        return torch.nonzero(x, **options)
    numbers = [
        torch.arange(size, device=x.device).reshape(-1, *[1] * (x.ndim - dim - 1)).expand(x.shape)
        for dim, size in enumerate(x.shape)
    ]
    if not as_tuple:
        return Selected(numbers[0].unsqueeze(1), x, counts=0)
    return tuple(Selected(each, x, counts=dim) for dim, each in enumerate(numbers))


def where(condition: Tensor, *others: Any, **options: Any) -> Any:
    """``torch.where``, with one argument too."""
    if others or options:
        return torch.where(condition, *others, **options)
    return nonzero(condition, as_tuple=True)


def index_select(x: Tensor, dim: int, index: Any) -> Any:
    """``torch.index_select``."""
    if dim != 0 or not is_selected(index) or is_selected(x):
        return torch.index_select(x, dim, index)
    return _by_selected(x, (index,))


def _known_mask(x: Any) -> Tensor | None:
    """The values of a mask that the forward pass has made of constants."""
    if type(x) is not FakeTensor or x.dtype is not torch.bool or x.ndim == 0:
        return None
    return x.constant


def _numbers(part: Any) -> tuple[Any, ...]:
    """A part of an index; a mask whose values are known, as the numbers that it selects."""
    known_mask = _known_mask(part)
    if known_mask is None:
        return (part,)
    with unset_fake_temporarily(), dispatch._disable_current_modes():
        places = known_mask.nonzero().unbind(1)
        numbers = [each.tolist() for each in places]
    return tuple(torch.tensor(each, dtype=torch.long, device=part.device) for each in numbers)


def _selects(x: Tensor, parts: tuple[Any, ...]) -> bool:
    """Whether an index is a mask of the first dims, and after it perhaps numbers and slices of the others."""
    if not parts or not _is_mask(parts[0]) or x.is_complex():
        return False
    others = all(part is None or type(part) in (int, slice) for part in parts[1:])  # a list pairs with rows
    return others and parts[0].shape == x.shape[: parts[0].ndim]


def masked_select(x: Tensor, mask: Tensor, **options: Any) -> Any:
    """``torch.masked_select``."""
    if options or not _is_mask(mask) or is_selected(x) or is_selected(mask) or x.is_complex():
        return torch.masked_select(x, mask, **options)
    return (
        selected_rows(x, mask) if x.shape == mask.shape else selected_rows(*torch.broadcast_tensors(x, mask))
    )


def setitem(x: Tensor, index: Any, values: Any) -> None:
    """``x[index] = values``; a choice by the mask if the values are rows that the same mask selects."""
    if is_selected(x):
        x[index] = values
        return
    parts = _parts(index)
    index = parts if isinstance(index, tuple) else parts[0]
    if any(map(is_selected, parts)):
        mask = counted_by(x, parts)
        index = tuple(part.rows() if is_selected(part) else part for part in parts) if mask is None else mask
    if not is_selected(values) or not _is_mask(index) or is_selected(index):
        x[index] = values
    elif not is_same(index, values.mask) or not _fits(values, x):
        x[index] = values.rows()
    else:
        x.copy_(torch.where(wide(index, x), values.values, x))


def selected_rows(x: Tensor, mask: Tensor) -> Selected:
    """``x[mask]``."""
    if x.is_floating_point():
        # finite in a logarithm or a quotient, and the difference of two such is not zero
        other: Any = 0.5 if x.requires_grad else 0.25
    else:
        other = False if x.dtype is torch.bool else 0
    values = torch.where(wide(mask, x), x, other)
    return Selected(values.contiguous(), mask, x)  # laid out as the rows, for the same views


def _is_mask(x: Any) -> bool:
    """Whether it is a mask with values that are known only at run time."""
    if is_selected(x):
        return bool(x.dtype is torch.bool)
    return isinstance(x, Tensor) and x.dtype is torch.bool and x.ndim > 0 and node_of(x) is not None


STAND_INS: dict[Callable, Callable] = {
    Tensor.__getitem__: getitem,
    Tensor.__setitem__: setitem,
    torch.nonzero: nonzero,
    Tensor.nonzero: nonzero,
    torch.where: where,
    torch.index_select: index_select,
    Tensor.index_select: index_select,
    torch.masked_select: masked_select,
    Tensor.masked_select: masked_select,
}
