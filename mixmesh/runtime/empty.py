"""Results for a rank whose piece is empty, made without running the operator.

Few operators accept dims of size 0 (some convolutions end the process), so none is run. A result that is
itself cut is empty; a partial sum is zero plus the terms that are only added, such as a bias. Every input
gets a gradient of zeros, so that ranks agree on the collectives of the backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..lang.ir import NOT_DIFFERENTIABLE, Arg, Partial, Shard
from ..lang.rules import RULES, LocalCall

LocalOp = Callable[..., tuple[torch.Tensor | None, ...]]


def is_empty(local: LocalCall) -> bool:
    """Whether a cut tensor of the call has no elements here, although the whole one has some."""
    held = [
        *zip(local.in_placements, local.in_shapes, local.call.inputs),
        *zip(local.out_placements, local.out_shapes, local.call.outputs),
    ]
    return any(
        isinstance(placement, Shard) and shape[placement.dim] == 0 and value.shape[placement.dim] > 0
        for placement, shape, value in held
    )


class Nothing(torch.autograd.Function):
    """Zeros that depend on every input, with a gradient of zero."""

    @staticmethod
    def forward(ctx, make, *tensors):
        ctx.likes = [(t.shape, t.dtype, t.device) if differentiable(t) else None for t in tensors]
        out = make()
        ctx.mark_non_differentiable(*(y for y in out if not differentiable(y)))
        return out

    @staticmethod
    def backward(ctx, *_):
        gradients = (like and torch.zeros(like[0], dtype=like[1], device=like[2]) for like in ctx.likes)
        return (None, *gradients)


def differentiable(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def empty_op(local: LocalCall, dtypes: list[torch.dtype], device: torch.device) -> LocalOp:
    """A function of the local inputs that returns the results of an empty piece."""
    addends = added_terms(local)

    def make():
        return tuple(torch.zeros(s, dtype=d, device=device) for s, d in zip(local.out_shapes, dtypes))

    if local.call.op in NOT_DIFFERENTIABLE:  # not differentiable on other ranks either
        return lambda *tensors: make()

    def run(*tensors):
        first, *rest = Nothing.apply(make, *tensors)
        for index, shape, scale in addends:
            first = first + tensors[index].reshape(shape) * scale
        return (first, *rest)

    return run


def added_terms(local: LocalCall) -> list[tuple[int, tuple[int, ...], Arg]]:
    """Inputs that are added to a partial result: position, shape against the result, and factor."""
    if not isinstance(local.out_placements[0], Partial):
        return []
    bound = RULES[local.call.op].bound(local.call)
    scale = dict(local.call.kwargs).get("beta", 1)
    terms = []
    for index in sorted(bound.additive):
        if index >= len(local.call.inputs):
            continue
        dims = bound.inputs[index]
        shape = tuple(
            n if dim and dim in dims else 1 for dim, n in zip(bound.outputs[0], local.out_shapes[0])
        )
        terms.append((index, shape, scale))
    return terms
