"""Indices of tensors by a mask, or by the numbers that it selects, during an export: ``x[mask]``, ``nonzero``
and what writes to such rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree

from .selected import COUNTED, Selected, has_one_choice, is_same, is_selected, node_of, wide

# in place of numbers in rows that are not selected, with a gradient and without one: finite in a logarithm or
# a quotient, and the difference of the two is not zero; numbers that nobody writes, for ``skipped`` takes the
# two for one
FILLS = 0.5009765625, 0.2509765625


def getitem(x: Tensor, index: Any) -> Any:
    """``x[index]``; selected rows if the index is a mask whose values are not known, or selected numbers."""
    if is_selected(x):
        return x[index]
    parts = _parts(index)
    index = parts[0] if len(parts) == 1 else parts
    if any(map(is_selected, parts)):
        return _by_selected(x, parts)
    if any(_known_mask(part) is not None for part in parts):
        return x[tuple(number for part in parts for number in _numbers(part))]
    if not _selects(x, parts):
        number = _known_number(parts[0]) if len(parts) == 1 else None
        return x[index] if number is None else x[number].reshape(*parts[0].shape, *x.shape[1:])
    selected = selected_rows(x, parts[0])
    return selected[(slice(None), *parts[1:])] if parts[1:] else selected


def _parts(index: Any) -> tuple[Any, ...]:
    """The parts of an index, with bytes as the masks that they stand for. After a tensor, perhaps a mask,
    those at the end are left out that take all of a dim."""
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(parts[0] if parts else None, Tensor) and not any(part is Ellipsis for part in parts):
        while len(parts) > 1 and isinstance(parts[-1], slice) and parts[-1] == slice(None):
            parts = parts[:-1]
    are_bytes = [isinstance(part, Tensor) and part.dtype is torch.uint8 for part in parts]
    return tuple(part.bool() if is_bytes else part for part, is_bytes in zip(parts, are_bytes))


def _fits(rows: Selected, x: Tensor) -> bool:
    """Whether selected rows can be written to those of ``x``, perhaps broadcast."""
    if rows.dtype is not x.dtype or rows.values.ndim != x.ndim:
        return False
    return all(size in (1, whole) for size, whole in zip(rows.values.shape, x.shape))


def _by_selected(x: Tensor, parts: tuple[Any, ...]) -> Any:
    """``x`` indexed by selected numbers: those of the rows themselves, other ones, or both."""
    if parts[0] is None and len(parts) == 2:
        led = _by_selected(x, parts[1:])
        return Led(led) if is_selected(led) else led.unsqueeze(0)
    for read in (_at_places, _at_numbers, _columns):
        rows = read(x, parts)
        if rows is not None:
            return rows
    return x[tuple(part.rows() if is_selected(part) else part for part in parts)]


def _at_places(x: Tensor, parts: tuple[Any, ...]) -> Any:
    """Rows at the places that a mask selects, and of each of them perhaps a part."""
    numbers = tuple(takewhile(is_selected, parts))
    others = parts[len(numbers) :]
    laid_out = _laid_out(x, numbers)
    if laid_out is None or not all(part is None or type(part) in (int, slice) for part in others):
        return None
    rows = selected_rows(*laid_out)
    return rows[(slice(None), *others)] if others else rows


def _at_numbers(x: Tensor, parts: tuple[Any, ...]) -> Any:
    """Rows at other numbers, such as those of a table."""
    first = parts[0]
    if len(parts) > 1 or not is_selected(first) or first.dtype is torch.bool or first.counts is not None:
        return None
    return first.of(x[first.places()])


def _columns(x: Tensor, parts: tuple[Any, ...]) -> Any:
    """A column of each row of a matrix."""
    if len(parts) != 2 or not all(map(is_selected, parts)) or parts[1].row_ndim != 0 or x.ndim != 2:
        return None
    mask = counted_by(x, parts[:1])
    if mask is None or not is_same(mask, parts[1].mask):
        return None
    rows = selected_rows(x, mask)
    return rows.of(rows.values.gather(1, parts[1].places().unsqueeze(1)).squeeze(1))


def counted_by(x: Tensor, parts: tuple[Any, ...]) -> Tensor | None:
    """The mask for which ``x[parts]`` are the rows ``x[mask]``, as ``parts`` are the numbers that it
    selects."""
    if not all(is_selected(part) and part.row_ndim == 0 and part.counts == n for n, part in enumerate(parts)):
        return None
    mask = parts[0].mask
    fits = len(parts) == mask.ndim and mask.shape == x.shape[: mask.ndim]
    return mask if fits and all(is_same(mask, part.mask) for part in parts) else None


def _laid_out(x: Tensor, numbers: tuple[Selected, ...]) -> tuple[Tensor, Tensor] | None:
    """``x`` with the first dims of a mask, and that mask, for which ``x[numbers]`` are the rows that it
    selects. The numbers are along different dims of the mask; what ``x`` lacks of its dims is repeated."""
    dims = [each.counts for each in numbers if each.row_ndim == 0 and each.counts is not None]
    if not numbers or len(dims) < len(numbers):
        return None
    mask = numbers[0].mask
    if len(set(dims)) < len(dims) or [mask.shape[d] for d in dims] != list(x.shape[: len(dims)]):
        return None
    if not all(is_same(mask, each.mask) for each in numbers):
        return None
    ordered = x
    if dims != sorted(dims):
        ordered = x.permute(*(dims.index(d) for d in sorted(dims)), *range(len(dims), x.ndim))
    for dim in range(mask.ndim):
        if dim not in dims:
            ordered = ordered.unsqueeze(dim)
    return ordered.expand(*mask.shape, *x.shape[len(dims) :]), mask


class Led(Tensor):
    """Selected rows behind a dim of one, ``x[None, numbers]``. It is there for a view that takes this dim
    away; anything else gets the rows themselves."""

    selected: Selected

    @staticmethod
    def __new__(cls, selected: Selected) -> Led:
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            led = Tensor._make_subclass(cls, torch.empty((), device="meta"))
        led.selected = selected
        return led

    def __init__(self, _: Selected) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name, rest = func.__name__, args[1:]
        if type(args[0]) is Led and not kwargs:
            rows = args[0].selected
            if (name == "squeeze" or name == "__getitem__") and rest == (0,):
                return rows
            shape = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
            if name in ("view", "reshape") and shape[:1] == (-1,) and shape[1:] == tuple(rows.row_shape):
                return rows
        args, kwargs = pytree.tree_map_only(
            Led, lambda led: led.selected.rows().unsqueeze(0), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def nonzero(x: Tensor, **options: Any) -> Any:
    """``torch.nonzero``; of a mask, as selected numbers."""
    as_tuple = options.get("as_tuple", False)
    if options.keys() - {"as_tuple"} or is_selected(x):
        return torch.nonzero(x, **options)
    if x.dtype is not torch.bool and x.ndim > 0 and node_of(x) is not None:
        x = x != 0
    if not _is_mask(x) or (x.ndim > 1 and not as_tuple):
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


def _known_number(x: Any) -> int | None:
    """The one number of a tensor that the forward pass has made of constants: an index that leads to a plain
    part."""
    if type(x) is not FakeTensor or x.dtype is not torch.long or x.numel() != 1 or x.constant is None:
        return None
    with unset_fake_temporarily(), dispatch._disable_current_modes():
        number = int(x.constant.item())
    return number if number >= 0 else None


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
    index = parts[0] if len(parts) == 1 else parts
    if any(map(is_selected, parts)):
        mask = counted_by(x, parts)
        if mask is None and len(parts) == 1 and is_selected(values) and _sets_once(x, parts[0], values):
            mask, values = _for_each(parts[0], values)
        index = tuple(part.rows() if is_selected(part) else part for part in parts) if mask is None else mask
    if not is_selected(values) or not _is_mask(index) or is_selected(index):
        x[index] = values
    elif not is_same(index, values.mask) or not _fits(values, x):
        x[index] = values.rows()
    else:
        x.copy_(torch.where(wide(index, x), values.values, x))


def index_add(x: Tensor, dim: int, index: Any, source: Any, **options: Any) -> Tensor:
    """``torch.index_add``; of rows that a mask selects as a sum of all rows, at the numbers of that mask, or
    else with zeros in place of the others."""
    addend = _addend(x, dim, index, source, options)
    if addend is not None:
        return x + addend
    return torch.index_add(x, dim, *_with_all_rows(index, source), **options)


def index_add_(x: Tensor, dim: int, index: Any, source: Any, **options: Any) -> Tensor:
    """``Tensor.index_add_``, as ``index_add``."""
    addend = _addend(x, dim, index, source, options)
    if addend is not None:
        return x.add_(addend)
    return x.index_add_(dim, *_with_all_rows(index, source), **options)


def _addend(x: Tensor, dim: int, index: Any, source: Any, options: dict[str, Any]) -> Tensor | None:
    if options.keys() - {"alpha"} or dim not in (0, -x.ndim) or is_selected(x) or not is_selected(source):
        return None
    if not _numbers_rows(x, index, source):
        return None
    addend = source.filled(0) * options["alpha"] if options else source.filled(0)
    others = [d for d in range(index.mask.ndim) if d != index.counts]
    return addend.sum(others) if others else addend


def _with_all_rows(index: Any, source: Any) -> tuple[Any, Any]:
    """An index and rows to add there, both of all rows: those that are not selected add zeros to the
    first."""
    if not is_selected(index) or not is_selected(source) or index.row_ndim != 0 or index.mask.ndim != 1:
        return index, source
    if index.dtype is torch.bool or not is_same(index.mask, source.mask):
        return index, source
    return index.places(), source.filled(0)


def _numbers_rows(x: Tensor, index: Any, rows: Selected) -> bool:
    """Whether ``index`` are the numbers of ``rows`` in ``x``, along one dim of the mask that selects both."""
    if not is_selected(index) or index.counts is None or index.row_ndim != 0 or rows.dtype is not x.dtype:
        return False
    is_of_x = index.mask.shape[index.counts] == x.shape[0] and rows.row_shape == x.shape[1:]
    return is_of_x and is_same(index.mask, rows.mask)


def _sets_once(x: Tensor, index: Selected, rows: Selected) -> bool:
    """Whether ``x[index] = rows`` writes to no place twice."""
    return (
        index.counts == 0
        and _numbers_rows(x, index, rows)
        and index.mask.ndim == 2
        and has_one_choice(index.mask)
    )


def _for_each(index: Selected, rows: Selected) -> tuple[Tensor, Selected]:
    """The mask of the places that a mask of places and their choices selects, and the row of each."""
    mask = index.mask.any(1)
    return mask, Selected(rows.filled(0).sum(1), mask)


def selected_rows(x: Tensor, mask: Tensor) -> Selected:
    """``x[mask]``."""
    if x.is_floating_point():
        other: Any = FILLS[0] if x.requires_grad else FILLS[1]
    else:
        other = False if x.dtype is torch.bool else 0
    values = torch.where(wide(mask, x), x, other)
    return Selected(values.contiguous(), mask, x)  # laid out as the rows, for the same views


def _is_mask(x: Any) -> bool:
    """Whether it is a mask with values that are known only at run time."""
    if is_selected(x):
        return bool(x.dtype is torch.bool)
    return isinstance(x, Tensor) and x.dtype is torch.bool and x.ndim > 0 and node_of(x) is not None


def div(x: Any, other: Any, **options: Any) -> Any:
    """``torch.div``; within a branch on whether a mask selects anything, its number is one at least, where a
    pass that computes the branch in any case must not divide by zero."""
    return torch.div(x, _divisor(other), **options)


def rtruediv(x: Tensor, other: Any) -> Any:
    """``other / x``, as ``div``."""
    return other / _divisor(x)


def _divisor(x: Any) -> Any:
    node = node_of(x) if isinstance(x, Tensor) and not is_selected(x) else None
    return x.clamp(min=1) if node is not None and node.meta.get(COUNTED) else x


STAND_INS: dict[Callable, Callable] = {
    Tensor.__rdiv__: rtruediv,
    Tensor.div: div,
    torch.div: div,
    Tensor.true_divide: div,
    torch.true_divide: div,
    Tensor.__getitem__: getitem,
    Tensor.__setitem__: setitem,
    torch.nonzero: nonzero,
    Tensor.nonzero: nonzero,
    torch.where: where,
    torch.index_select: index_select,
    Tensor.index_select: index_select,
    torch.index_add: index_add,
    Tensor.index_add: index_add,
    Tensor.index_add_: index_add_,
    torch.masked_select: masked_select,
    Tensor.masked_select: masked_select,
}
