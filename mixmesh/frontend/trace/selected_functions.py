"""Functions of the rows that a mask selects: reductions, losses, layers and changes of shape."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .locate import is_users_own
from .row_indices import STAND_INS, selected_rows
from .selected import (
    Selected,
    Unknown,
    aligned,
    by_element,
    is_counted,
    is_same,
    is_selected,
    known,
    shape_of,
    wide,
)

__all__ = ["STAND_INS"]


class Both(NamedTuple):
    """The results of ``max``, ``sort`` and ``topk`` along a dim."""

    values: Selected
    indices: Selected


def _wrapped(first: Selected, result: Any) -> Any:
    if isinstance(result, Tensor):
        return first.of(result)
    parts = [first.of(part) for part in result]
    return Both(*parts) if hasattr(result, "indices") else tuple(parts)


def _dims(x: Selected, dim: Any) -> tuple[list[int], bool]:
    """The dims of ``values`` that are reduced, and whether the rows are among them."""
    if dim is None or dim == () or dim == []:
        return list(range(x.values.ndim)), True
    dims = [dim] if isinstance(dim, int) else list(dim)
    dims = [d + x.ndim if d < 0 else d for d in dims]
    leading = list(range(x.mask.ndim)) if 0 in dims else []
    return leading + [x.place(d) for d in dims if d], 0 in dims


def _reduced(
    x: Selected, dim: Any, keepdim: bool, other: Any, run: Callable[[Tensor, list[int]], Tensor]
) -> Any:
    """A reduction, to which a row that is not selected brings ``other``."""
    dims, of_rows = _dims(x, dim)
    if not of_rows:
        return x.of(run(x.values, dims))
    result = run(x.filled(other), dims)
    if keepdim and dim is not None:  # one dim of the rows in place of those of the mask
        return result.reshape(1, *result.shape[x.mask.ndim :])
    return result


@known("sum")
def _sum(func: Callable, x: Selected, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _reduced(x, dim, keepdim, 0, lambda v, dims: v.sum(dims, keepdim and dim is not None, dtype=dtype))


HALVES = (torch.float16, torch.bfloat16)


@known("mean")
def _mean(func: Callable, x: Selected, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims, of_rows = _dims(x, dim)
    wanted = dtype or x.dtype
    if wanted in HALVES and of_rows:  # their sum may be too large, and their number is rounded
        return _mean(func, x, dim, keepdim, dtype=torch.float32).to(wanted)
    total = _sum(func, x, dim, keepdim, dtype=dtype)
    number = math.prod(x.values.shape[d] for d in dims if d >= x.mask.ndim)
    return total / (x.divisor() * number) if of_rows else total / number


@known("var", "std")
def _var(
    func: Callable, x: Selected, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
    correction: Any = None,
) -> Any:  # fmt: skip
    dims, of_rows = _dims(x, None if isinstance(dim, bool) else dim)
    if correction is None:
        correction = int(dim if isinstance(dim, bool) else unbiased)
    if not of_rows:
        return x.of(func(x.values, dims, correction=correction, keepdim=keepdim))
    if keepdim or len(dims) < x.values.ndim:
        raise Unknown
    if x.dtype in HALVES:
        return _var(func, x.of(x.values.float()), correction=correction).to(x.dtype)
    squares = x.of((x.values - _mean(func, x)).square())
    variance = _sum(func, squares) / (x.numel() - correction)
    return variance.sqrt() if func.__name__ == "std" else variance


@known("norm", "vector_norm", "linalg_vector_norm")
def _norm(func: Callable, x: Selected, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
    p = {"fro": 2}.get(p, p)
    if not isinstance(p, int | float) or p <= 0:
        raise Unknown
    norm = partial(torch.linalg.vector_norm, ord=p, keepdim=keepdim and dim is not None)
    return _reduced(x, dim, keepdim, 0, lambda values, dims: norm(values, dim=dims))


@known("linalg_norm")
def _matrix_norm(func: Callable, x: Selected, ord: Any = None, dim: Any = None, keepdim: bool = False) -> Any:
    if ord is not None and not isinstance(dim, int):
        raise Unknown
    return _norm(func, x, 2 if ord is None else ord, dim, keepdim)


@known("amax", "amin")
def _extreme(func: Callable, x: Selected, dim: Any = (), keepdim: bool = False) -> Any:
    dim = None if dim == () else dim
    other = _least(x) if func.__name__ == "amax" else _largest(x)
    return _reduced(x, dim, keepdim, other, lambda v, dims: func(v, dims, keepdim and dim is not None))


@known("max", "min")
def _max(func: Callable, x: Any, other: Any = None, keepdim: bool = False, *, dim: Any = None) -> Any:
    if is_selected(other) or isinstance(other, Tensor):
        return by_element(func, x, other)
    dim = other if dim is None else dim
    if dim is not None:
        return _wrapped(x, func(x.values, x.place(dim), keepdim))
    return func(x.filled(_least(x) if func.__name__ == "max" else _largest(x)))


def _least(x: Selected) -> Any:
    return -torch.inf if x.values.is_floating_point() else torch.iinfo(x.dtype).min


def _largest(x: Selected) -> Any:
    return torch.inf if x.values.is_floating_point() else torch.iinfo(x.dtype).max


@known("any", "all")
def _any(func: Callable, x: Selected, dim: Any = None) -> Any:
    if dim is not None:
        return x.of(func(x.values, x.place(dim)))
    return func(x.filled(func.__name__ == "all"))


@known("logsumexp")
def _logsumexp(func: Callable, x: Selected, dim: Any, keepdim: bool = False) -> Any:
    return _reduced(x, dim, keepdim, -torch.inf, lambda values, dims: func(values, dims, keepdim))


@known("softmax", "log_softmax", "softmin", "cumsum", "cumprod")
def _along(func: Callable, x: Selected, dim: int, **options: Any) -> Selected:
    return x.of(func(x.values, x.place(dim), **options))


@known("squeeze")
def _squeeze(func: Callable, x: Selected, dim: int) -> Selected:
    return x.seen_as(x.values.squeeze(x.place(dim)))


@known("argmax", "argmin", "argsort", "sort", "unbind")
def _at(func: Callable, x: Selected, dim: int | None = None, *others: Any, **options: Any) -> Any:
    if dim is None:
        raise Unknown
    return _wrapped(x, func(x.values, x.place(dim), *others, **options))


@known("topk", "chunk", "split", "tensor_split")
def _parts(func: Callable, x: Selected, size: Any, dim: int | None = None, *others: Any) -> Any:
    dim = dim if dim is not None else -1 if func.__name__ == "topk" else 0
    return _wrapped(x, func(x.values, size, x.place(dim), *others))


@known("unsqueeze")
def _unsqueeze(func: Callable, x: Selected, dim: int) -> Selected:
    return x.of(x.values.unsqueeze(x.place(dim, 1)))


@known("gather")
def _gather(func: Callable, x: Selected, dim: int, index: Selected) -> Selected:
    if not is_selected(x) or not is_selected(index):
        raise Unknown
    first, (values, places) = aligned(x, index.of(index.places()))
    return first.of(torch.gather(values, x.place(dim), places))


@known("cat", "concat", "concatenate")
def _cat(func: Callable, tensors: Sequence[Any], dim: int = 0) -> Selected:
    if not all(map(is_selected, tensors)):
        raise Unknown
    first, values = aligned(*tensors)
    return first.of(torch.cat(values, first.place(dim)))


@known("stack")
def _stack(func: Callable, tensors: Sequence[Any], dim: int = 0) -> Selected:
    if not all(map(is_selected, tensors)):
        raise Unknown
    first, values = aligned(*tensors)
    return first.of(torch.stack(values, first.place(dim, 1)))


@known("view", "reshape")
def _view(func: Callable, x: Selected, *shape: Any) -> Selected:
    row = x.row_shape
    wanted = _wanted(x, tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)
    if wanted == (-1,):  # each element is selected with its row
        if row.numel() == 1:
            return x.seen_as(x.values.reshape(x.mask.shape))
        return Selected(x.values, wide(x.mask, x.values).expand(x.values.shape))
    if wanted[0] != -1 or torch.Size(wanted[1:]).numel() != row.numel():
        raise Unknown
    return x.of(x.values.reshape(*x.mask.shape, *wanted[1:]))


def _wanted(x: Selected, shape: tuple) -> tuple[int, ...]:
    """The sizes of a view of rows, of which the number of the rows, ``x.size(0)``, is -1."""
    if len(shape) > 1 and isinstance(shape[0], Tensor) and is_same(shape[0], x.count()):
        shape = (-1, x.row_shape.numel()) if len(shape) == 2 and shape[1] == -1 else (-1, *shape[1:])
    if not shape or not all(type(size) is int for size in shape):
        raise Unknown
    return shape


@known("flatten")
def _flatten(func: Callable, x: Selected, start_dim: int = 0, end_dim: int = -1) -> Selected:
    end = end_dim + x.ndim if end_dim < 0 else end_dim
    if start_dim == 0 and end == x.ndim - 1:
        return _view(func, x, -1)
    return x.of(x.values.flatten(x.place(start_dim), x.place(end)))


@known("getitem")
def _getitem(func: Callable, x: Any, index: Any) -> Any:
    if not is_selected(x):  # by selected numbers
        raise Unknown
    if is_selected(index) and index.dtype is torch.bool:
        return selected_rows(x.values, _mask_within(x, index))
    return x.of(x.values[_index_within(x, index)])


def _mask_within(x: Selected, index: Selected) -> Tensor:
    """The mask of the rows or elements of ``x`` that other selected rows select."""
    if index.row_ndim not in (0, x.row_ndim) or not is_same(index.mask, x.mask):
        raise Unknown
    if index.row_ndim and index.values.shape != x.values.shape:
        raise Unknown
    return index.filled(False)


def _index_within(x: Selected, index: Any) -> tuple[Any, ...]:
    """The index of ``values`` for one of the rows that takes of each row the same."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    lists = [i for i in rest if isinstance(i, list)]
    others = [i for i in rest if i is not None and type(i) not in (slice, int) and i is not Ellipsis]
    if len(others) > len(lists) or (lists and len(lists) + sum(type(i) is int for i in rest) > 1):
        raise Unknown
    if first is Ellipsis and sum(i is not None for i in rest) <= x.row_ndim:
        return (Ellipsis, *rest)
    if not isinstance(first, slice) or first != slice(None):
        raise Unknown
    return (*[slice(None)] * x.mask.ndim, *rest)


@known("setitem")
def _setitem(func: Callable, x: Selected, index: Any, value: Any) -> None:
    """Writes a number, or other rows of the same mask, to a part of each row or to some rows."""
    if not is_selected(x):
        raise Unknown
    if is_selected(index):
        if not isinstance(value, int | float):
            raise Unknown
        mask = _mask_within(x, index)
        x.values.masked_fill_(wide(mask, x.values), value)
        return
    place = _index_within(x, index)
    if is_selected(value):
        _, (_, value) = aligned(x.of(x.values[place]), value)
    elif not isinstance(value, int | float):
        raise Unknown
    x.values[place] = value


@known("linear", "embedding", "layer_norm", "rms_norm")
def _layer(func: Callable, x: Any, *others: Any, **options: Any) -> Selected:
    if any(map(is_selected, (*others, *options.values()))) or not is_selected(x):
        raise Unknown
    name = func.__name__
    if name in ("layer_norm", "rms_norm"):
        shape = others[0] if others else options["normalized_shape"]
        needed = 1 if isinstance(shape, int) else len(shape)
    else:
        needed = 1 if name == "linear" else 0
    if x.row_ndim < needed:
        raise Unknown
    return x.of(func(x.places() if name == "embedding" else x.values, *others, **options))


@known("matmul", "mm")
def _matmul(func: Callable, x: Any, other: Any) -> Selected:
    if not is_selected(x) or is_selected(other) or x.row_ndim != 1 or other.ndim not in (1, 2):
        raise Unknown
    return x.of(torch.matmul(x.values, other))


@known("normalize")
def _normalize(func: Callable, x: Selected, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Selected:
    return x.of(F.normalize(x.values, p, x.place(dim), eps))


@known("cosine_similarity")
def _cosine(func: Callable, x: Any, other: Any, dim: int = 1, eps: float = 1e-8) -> Selected:
    first, (left, right) = aligned(x, other)
    return first.of(F.cosine_similarity(left, right, first.place(dim), eps))


@known("one_hot")
def _one_hot(func: Callable, x: Selected, num_classes: int = -1) -> Selected:
    if num_classes < 0:
        raise Unknown
    return x.of(F.one_hot(x.places(), num_classes))


@known("dropout")
def _dropout(func: Callable, x: Selected, p: float = 0.5, *others: bool, **options: Any) -> Selected:
    """Draws numbers for all rows, which differ from those of one device as they do in every dropout."""
    return x.of(func(x.values, p, *others, **options))


@known("zeros_like", "ones_like", "full_like")
def _like(func: Callable, x: Selected, *args: Any, **options: Any) -> Selected:
    return x.of(func(x.values, *args, **options))


@known("new_zeros", "new_ones", "new_full", "new_tensor")
def _new(func: Callable, x: Selected, *args: Any, **options: Any) -> Any:
    if any(isinstance(arg, Tensor) for arg in pytree.tree_leaves(args)):
        raise Unknown
    return func(x.values, *args, **options)


@known("expand_as", "view_as", "reshape_as")
def _as_other(func: Callable, x: Selected, other: Selected) -> Selected:
    if not is_selected(x) or not is_selected(other) or not is_same(x.mask, other.mask):
        raise Unknown
    if func.__name__ == "expand_as" and x.row_ndim != other.row_ndim:
        raise Unknown
    return x.of(func(x.values, other.values))


@known("is_floating_point", "is_complex", "element_size", "get_device", "is_signed")
def _of_any_row(func: Callable, x: Selected) -> Any:
    return func(x.values)


@known("numel", "nelement")
def _numel(func: Callable, x: Selected) -> Tensor:
    return x.count() * x.row_shape.numel()


@contextmanager
def lengths_of_rows() -> Iterator[None]:
    """A context in which ``len(x[mask])`` is a tensor in the user's own files, as ``x[mask].shape[0]`` is:
    Python's own returns an int only, which would be that of one batch. In ``builtins`` it would also be what
    torch.compile, whose tables are made at its first use, takes for Python's own."""
    scripts = [vars(module) for module in list(sys.modules.values()) if _is_of_user(module)]
    scripts = [names for names in scripts if "len" not in names]
    for names in scripts:
        names["len"] = _length
    try:
        yield
    finally:
        for names in scripts:
            names.pop("len", None)  # one module may have two names


def _length(x: Any, /) -> Any:
    return x.count() if type(x) is Selected else len(x)


def _is_of_user(module: Any) -> bool:
    file = getattr(module, "__dict__", {}).get("__file__")
    return module is sys.modules["__main__"] or isinstance(file, str) and is_users_own(file)


@known("size")
def _size(func: Callable, x: Selected, dim: int | None = None) -> Any:
    return shape_of(x) if dim is None else shape_of(x)[dim]


@known("dim", "ndimension")
def _ndim(func: Callable, x: Selected) -> int:
    return 1 + x.row_ndim


@known(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
    "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "hinge_embedding_loss",
    "margin_ranking_loss",
)  # fmt: skip
def _loss(func: Callable, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(func).bind(*args, **kwargs)
    reduction = _reduction(call.arguments)
    call.arguments["reduction"] = "none"
    each = by_element(func, *call.args, **call.kwargs)
    if reduction == "batchmean":
        return _sum(func, each) / each.divisor()
    weight = call.arguments.get("weight")
    if reduction == "mean" and weight is not None and func in (F.mse_loss, F.l1_loss):
        return _sum(func, each) / weight.sum()
    return each if reduction == "none" else getattr(each, reduction)()


@known("cross_entropy", "nll_loss")
def _classes(func: Callable, x: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(func).bind(x, target, *args, **kwargs)
    reduction = _reduction(call.arguments)
    if not is_selected(x) or not is_selected(target) or not is_same(x.mask, target.mask) or x.row_ndim < 1:
        raise Unknown
    scores = _rows(x.values, x)
    if target.values.is_floating_point():  # weights of the classes
        call.arguments |= {"input": scores, "target": _rows(target.values, target), "reduction": "none"}
        each = x.of(_back(func(*call.args, **call.kwargs), x))
        return each if reduction == "none" else getattr(each, reduction)()
    left_out = call.arguments.get("ignore_index", -100)
    targets = _rows(target.filled(left_out), target)
    call.arguments |= {"input": scores, "target": targets, "reduction": reduction}
    is_plain = call.arguments.get("weight") is None and not call.arguments.get("label_smoothing")
    if reduction == "mean" and is_plain and is_counted(x.mask):
        call.arguments["reduction"] = "sum"
        number = (targets != left_out).sum()
        return func(*call.args, **call.kwargs) / (number + (x.count() == 0))
    result = func(*call.args, **call.kwargs)
    return x.of(_back(result, x)) if reduction == "none" else result


def _rows(values: Tensor, x: Selected) -> Tensor:
    return values.reshape(x.mask.shape.numel(), *values.shape[x.mask.ndim :])


def _back(values: Tensor, x: Selected) -> Tensor:
    return values.reshape(*x.mask.shape, *values.shape[1:])


def _reduction(arguments: dict[str, Any]) -> str:
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        raise Unknown
    return arguments.get("reduction", "mean")
