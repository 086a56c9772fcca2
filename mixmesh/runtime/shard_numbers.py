"""Numbers that depend on all ranks' pieces: a norm, a sum, the largest element.

The number of a rank's own piece is known at once. The others are fetched when the result is first used, by
one small all_gather for all numbers that are used together: clipping a hundred gradients by their norm takes
one message, not a hundred. Every rank must ask for the same numbers in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import collectives
from .comm import Comm

Off = torch._C.DisableTorchFunctionSubclass

# for each kind: the function that combines all ranks' numbers (along dim 0); the neutral number for a rank
# without a piece
COMBINE: dict[str, tuple[Callable[[Tensor, float], Tensor], float]] = {
    "sum": (lambda x, _: x.sum(0), 0.0),
    "norm": (lambda x, order: torch.linalg.vector_norm(x, order, dim=0), 0.0),
    "max": (lambda x, _: x.amax(0), -math.inf),
    "min": (lambda x, _: x.amin(0), math.inf),
}
# facts about a number that are known without asking the other ranks
_OWN = frozenset(("to", "float", "double", "detach", "clone", "cpu", "cuda", "reshape", "view"))
_GETTERS = frozenset(("device", "dtype", "shape", "ndim", "requires_grad", "is_cuda", "is_meta", "layout"))


class ShardNumber(torch.Tensor):
    """A number of this rank's piece that stands for the whole tensor's. Its gradient goes back to rank
    ``row``: this rank, or the one that represents all replicas."""

    comm: Comm
    kind: str
    order: float
    row: int
    answer: Tensor | None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__" and func.__self__.__name__ in _GETTERS:
            with Off():
                return func(*args, **kwargs)
        if name in _OWN and isinstance(args[0], ShardNumber) and args[0].answer is None:
            with Off():
                out = func(*args, **kwargs)
            return _number(out, args[0].comm, args[0].kind, args[0].order, args[0].row)
        args, kwargs = known((args, kwargs))
        return func(*args, **kwargs)


def number(
    mine: Tensor | None,
    comm: Comm,
    kind: str,
    *,
    order: float = 2.0,
    row: int,
    dtype: torch.dtype,
    has_gradient: bool = False,
) -> ShardNumber:
    """A number of the whole tensor, made from the number of this rank's piece (None if that does not
    count: it then has a gradient, which goes nowhere, if the other ranks' numbers have one)."""
    if mine is None:
        wide = dtype if dtype.is_floating_point else torch.float64  # integers have no infinity
        mine = torch.full((), COMBINE[kind][1], dtype=wide, device=comm.device, requires_grad=has_gradient)
    return _number(mine, comm, kind, order, row)


def _number(x: Tensor, comm: Comm, kind: str, order: float, row: int) -> ShardNumber:
    with Off():
        x = x.view_as(x)  # a new object, so that its class can be changed
    x.__class__ = ShardNumber
    assert isinstance(x, ShardNumber)
    x.comm, x.kind, x.order, x.row, x.answer = comm, kind, order, row, None
    return x


def known(tree: Any) -> Any:
    """The arguments with every piece's number replaced by that of the whole. Collective if there are any."""
    leaves, spec = pytree.tree_flatten(tree)
    asked = list({id(x): x for x in leaves if isinstance(x, ShardNumber)}.values())
    if not asked:
        return tree
    _ask([x for x in asked if x.answer is None])
    return pytree.tree_unflatten([x.answer if isinstance(x, ShardNumber) else x for x in leaves], spec)


def _ask(numbers: Sequence[ShardNumber]) -> None:
    if not numbers:
        return
    comm = numbers[0].comm
    with Off():
        mine = torch.stack([x.as_subclass(Tensor).double().reshape(()) for x in numbers])
        kinds = " and ".join(sorted({x.kind for x in numbers}))
        with comm.call(f"the {kinds} of tensors that are cut"):
            everyones = _Everyones.apply(mine, comm, tuple((x.row, COMBINE[x.kind][1]) for x in numbers))
        for n, x in enumerate(numbers):
            combine, _ = COMBINE[x.kind]
            x.answer = combine(everyones[:, n], x.order).to(x.dtype).reshape(x.shape)


class _Everyones(torch.autograd.Function):
    """Gathers all ranks' numbers, one row each. A replica contributes nothing, and gets the gradient of the
    rank that represents it. The backward needs no communication, as the rest of the graph is the same on all
    ranks."""

    @staticmethod
    def forward(ctx, mine: Tensor, comm: Comm, rows: tuple[tuple[int, float], ...]):
        ctx.rows = [row for row, _ in rows]
        said = mine.clone()
        for n, (row, nothing) in enumerate(rows):
            if row != comm.rank:
                said[n] = nothing
        channel = comm.channel(comm.everyone, "all_gather of numbers of shards")
        return collectives.all_gather(channel, said.unsqueeze(0), [1] * comm.world_size)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient[ctx.rows, range(len(ctx.rows))], None, None
