"""Functions of shards that give one number: each rank's number of its piece, combined over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .shard_numbers import ShardNumber, known, number
from .shard_rules import Rule
from .shard_whole import ShardBase, check_alike, refusal

NORMS = ("norm", "linalg_vector_norm")
SPREADS = ("var", "std")


def reduce_whole(func: Callable, rule: Rule, args: tuple, kwargs: dict) -> Any:
    """The number that ``func``, a reduction, gives for the whole. Raises InputError along a dim."""
    if rule.is_list:
        return _norms(args, kwargs)
    if rule.name in ("equal", "allclose"):
        return _are_alike(func, rule, args, kwargs)
    name, x, rest = rule.name, args[0], args[1:]
    if name in NORMS:
        order, rest = _order(rest, kwargs), rest[1:]
    if name in SPREADS:
        rest, kwargs = _with_correction(rest, kwargs)
    dims = kwargs.get("dim", rest[0] if rest else None)
    if dims not in (None, (), []) or not isinstance(x, ShardBase):
        raise refusal(f"{name} along a dim", x.whole if isinstance(x, ShardBase) else args[1].whole)
    if name in NORMS:
        return _norm(x, order, kwargs.get("dtype"))
    if name in ("sum", "mean"):
        return _sum(x, x.whole.shape.numel() if name == "mean" else None, kwargs.get("dtype"))
    if name in SPREADS:
        return _spread(name, x, kwargs["correction"])
    if name in ("any", "all", "count_nonzero"):
        return _count(func, name, x)
    return _extreme(func, name, x)


def _order(rest: tuple, kwargs: dict) -> float:
    """The order that a norm was asked for, by the arguments after its tensor."""
    order = kwargs.get("p", kwargs.get("ord", rest[0] if rest else 2.0))
    return 2.0 if order in (None, "fro") else float(order)


def _with_correction(rest: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of a variance after its tensor, with ``correction`` in place of PyTorch's older
    ``unbiased``, which may be the first of them: ``x.std(False)``."""
    flags = rest[:1] if rest and isinstance(rest[0], bool) else ()
    unbiased = kwargs.get("unbiased", flags[0] if flags else True)
    correction = kwargs.get("correction")
    return rest[len(flags) :], {**kwargs, "correction": float(unbiased) if correction is None else correction}


def _norms(args: tuple, kwargs: dict) -> list[Any]:
    order = kwargs.get("ord", args[1] if len(args) > 1 else 2.0)
    norm = partial(torch.linalg.vector_norm, ord=order)
    return [
        _number("norm", norm, x, x.dtype, order) if isinstance(x, ShardBase) else norm(x) for x in args[0]
    ]


def _norm(x: ShardBase, order: float, dtype: torch.dtype | None) -> ShardNumber:
    norm = partial(torch.linalg.vector_norm, ord=order, dtype=dtype)
    return _number("norm", norm, x, dtype or x.dtype, order)


def _sum(x: ShardBase, over: int | None, dtype: torch.dtype | None) -> ShardNumber:
    """The sum; or the mean, a sum of parts ``over`` the number of all elements."""

    def part(piece: Tensor) -> Tensor:
        own = piece.sum(dtype=dtype)
        return own if over is None else own / over

    return _number("sum", part, x, dtype or x.dtype)


def _spread(name: str, x: ShardBase, correction: float) -> Tensor:
    """The variance, or the standard deviation, of all elements. Its gradient is that for a constant mean, as
    deviations from the mean add up to 0."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    count = x.whole.shape.numel()
    with torch.no_grad():
        mean = known(_sum(x, count, wide))
    squares = known(_number("sum", lambda piece: (piece.to(wide) - mean).square().sum(), x, wide))
    variance = squares / max(count - correction, 0)
    return (variance if name == "var" else variance.sqrt()).to(x.dtype)


def _count(func: Callable, name: str, x: ShardBase) -> Tensor:
    kind = {"any": "max", "all": "min", "count_nonzero": "sum"}[name]
    told = known(_number(kind, lambda piece: func(piece).double(), x, torch.float64))
    return told.long() if name == "count_nonzero" else told > 0


def _extreme(func: Callable, name: str, x: ShardBase) -> ShardNumber:
    if torch.is_grad_enabled() and x.requires_grad:
        raise refusal(f"{name} with a gradient", x.whole)
    return _number(name.removeprefix("a"), func, x, x.dtype)


def _number(
    kind: str, part: Callable[[Tensor], Tensor], x: ShardBase, dtype: torch.dtype, order: float = 2.0
) -> ShardNumber:
    """The number of all pieces by ``kind``, combined from ``part``, that of one piece."""
    whole, stored = x.whole, x.whole.stored
    has_gradient = torch.is_grad_enabled() and x.requires_grad
    if stored.copies and has_gradient:
        raise refusal(f"{kind} with a gradient", whole, "of which ranks hold copies that overlap")
    holds = x.numel() > 0 and whole.comm.rank in stored.held.ranks
    value = part(x.as_subclass(Tensor)) if holds else None
    if value is not None and not stored.counts(whole.comm.rank) and stored.copies:
        value = None
    row = whole.spokesman
    return number(value, whole.comm, kind, order=order, row=row, dtype=dtype, has_gradient=has_gradient)


def _are_alike(func: Callable, rule: Rule, args: tuple, kwargs: dict) -> bool:
    first = next(x for x in args if isinstance(x, ShardBase))
    tensors = [x for x in args if isinstance(x, Tensor)]
    if rule.name == "equal":
        if any(_has_another_shape(first, x) for x in tensors):
            return False
        tensors = [x for x in tensors if isinstance(x, ShardBase)]  # others may differ in shape on one rank
    check_alike(rule.name, first, tensors)
    alike = torch.tensor(float(func(*args, **kwargs)), dtype=torch.float64, device=first.whole.comm.device)
    whole = first.whole
    asked = number(alike, whole.comm, "min", row=whole.spokesman, dtype=torch.float64)
    return bool(known(asked) > 0)


def _has_another_shape(first: ShardBase, x: Tensor) -> bool:
    """Whether a tensor has neither the shape of the whole nor that of any rank's piece: all ranks say the
    same."""
    stored = first.whole.stored
    if isinstance(x, ShardBase):
        return x.whole.stored.shape != stored.shape
    ranks = range(first.whole.comm.world_size)
    return tuple(x.shape) not in {stored.shape, *(stored.held.shape(stored.shape, r) for r in ranks)}
