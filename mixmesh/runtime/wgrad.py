"""Split weight gradients: products whose weight gradient is computed separately from their input's
(``wgrad``, see ``ir.wgrad``).

PyTorch's node for ``linear`` or a convolution makes the gradients of input and weight in one go. Here it
makes only the input's, and the parameters bypass autograd: their gradients are made when the program says so,
and handed to the receiver that sums them. Those that overlap a collective are made by the autograd node that
has started it (``redistribute``), before the node that awaits it can run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..lang.ir import Instruction, wgrad_of
from ..lang.rules import RULES, LocalCall
from .gradients import add

LocalOp = Callable[..., tuple[Tensor]]


class Receiver(Protocol):
    """Receives the gradients of parameters."""

    def expects(self, p: Tensor, uses: int) -> None:
        """Announces ``uses`` more uses of a parameter (or, negative, fewer) that will bring it a gradient."""

    def arrived(self, p: Tensor, gradient: Tensor) -> None:
        """Takes the gradient of one use, which is then no longer expected: if no other use is either, the
        parameter's gradient is complete."""

    def postponed(self, p: Tensor, make: Callable[[], Tensor]) -> None:
        """Takes a gradient to be made after the rest of the backward pass."""

    def waiting(self, collective: str, p: Tensor, make: Callable[[], Tensor]) -> None:
        """Takes a gradient to be made when that redistribution's gradient is on its way."""

    def sent(self, collective: str) -> None:
        """Called when the gradient of that redistribution is on its way."""


class AtOnce:
    """A receiver that adds gradients immediately, for programs without sums."""

    def expects(self, p: Tensor, uses: int) -> None:
        pass

    def arrived(self, p: Tensor, gradient: Tensor) -> None:
        add(p, gradient)

    def postponed(self, p: Tensor, make: Callable[[], Tensor]) -> None:
        self.arrived(p, make())

    def waiting(self, collective: str, p: Tensor, make: Callable[[], Tensor]) -> None:
        self.arrived(p, make())

    def sent(self, collective: str) -> None:
        pass


@dataclass(frozen=True)
class Linear:
    """The gradients of ``linear``; x may have any number of dims."""

    def of_input(self, gy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return gy @ weight

    def of_weight(self, gy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return gy.flatten(0, -2).T @ x.flatten(0, -2)

    def of_bias(self, gy: Tensor) -> Tensor:
        return gy.flatten(0, -2).sum(0)


@dataclass(frozen=True)
class Convolution:
    """The gradients of a convolution of ``dims`` dims of space."""

    dims: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, local: LocalCall) -> Convolution:
        """Reads a call ``convNd(x, weight, bias, stride, padding, dilation, groups)``, as a rank makes it."""
        rule = RULES[local.call.op]
        args, kwargs = local.call.args, local.call.kwargs
        if rule.local is not None:
            args, kwargs = rule.local(local)
        dims = len(local.in_shapes[0]) - 2
        named = dict(kwargs)

        def given(position: int, name: str, default: int):
            return args[position] if position < len(args) else named.get(name, default)

        def each(value) -> tuple[int, ...]:
            value = (value,) if isinstance(value, int) else tuple(value)
            return value * dims if len(value) == 1 else value

        stride, padding, dilation = (
            each(given(*of)) for of in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
        )
        return cls(dims, stride, padding, dilation, given(6, "groups", 1))

    def _backward(self, gy: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
        how = (self.stride, self.padding, self.dilation, False, (0,) * self.dims, self.groups)
        mask = [which == 0, which == 1, False]
        return torch.ops.aten.convolution_backward(gy, x, weight, None, *how, mask)[which]

    def of_input(self, gy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(gy, x, weight, 0)

    def of_weight(self, gy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(gy, x, weight, 1)

    def of_bias(self, gy: Tensor) -> Tensor:
        return gy.sum([0, *range(2, gy.dim())])


def wgrad_op(
    i: Instruction,
    local: LocalCall,
    plain: LocalOp,
    receiver: Receiver,
    around: Callable[[], AbstractContextManager] = nullcontext,
    beside: str | None = None,
) -> LocalOp:
    """The local operator of an instruction with ``wgrad``; ``plain`` is the operator without that attribute.
    The weight gradient is made within ``around()``, and ``beside`` names the redistribution whose gradient it
    overlaps, if any."""
    gradients = Linear() if i.op == "aten.linear" else Convolution.of(local)
    later = receiver.postponed if wgrad_of(i) == "last" else None
    if beside is not None:
        later = partial(receiver.waiting, beside)
    how = _How(plain, gradients, receiver, later, around)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor]:
        params = (weight,) if bias is None else (weight, bias)
        # an empty piece has nothing to multiply, and some kernels reject it
        is_whole = x.numel() > 0 and weight.numel() > 0
        apart = torch.is_grad_enabled() and x.requires_grad and is_whole
        if not apart or not all(p.is_leaf and p.requires_grad for p in params):
            return plain(x, *params)
        return (_Product.apply(x, params, how),)

    return run


@dataclass(frozen=True)
class _How:
    plain: LocalOp
    gradients: Linear | Convolution
    receiver: Receiver
    # a function that takes gradients to be made later
    later: Callable[[Tensor, Callable[[], Tensor]], None] | None
    around: Callable[[], AbstractContextManager]


class _Uses:
    """The gradients that a receiver expects from one call, until they are made or the call's graph is freed
    without them: a backward pass may have several losses, each of which brings a parameter one gradient."""

    def __init__(self, receiver: Receiver, params: tuple[Tensor, ...]) -> None:
        self._receiver, self._left = receiver, list(params)
        for p in params:
            receiver.expects(p, 1)

    def over(self, p: Tensor) -> None:
        if any(p is one for one in self._left):
            self._left = [one for one in self._left if one is not p]
            self._receiver.expects(p, -1)

    def __del__(self) -> None:
        for p in self._left:
            self._receiver.expects(p, -1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, params: tuple[Tensor, ...], how: _How) -> Tensor:
        ctx.save_for_backward(x)
        ctx.params, ctx.how = params, how
        ctx.uses = _Uses(how.receiver, params)
        (y,) = how.plain(x, *(p.detach() for p in params))
        return y

    @staticmethod
    def backward(ctx, gy: Tensor):
        (x,), how, uses = ctx.saved_tensors, ctx.how, ctx.uses
        weight, *bias = ctx.params
        held = weight.detach()

        def make() -> Tensor:
            uses.over(weight)
            with how.around():
                return how.gradients.of_weight(gy, x, held)

        if how.later is None:
            how.receiver.arrived(weight, make())
        gx = how.gradients.of_input(gy, x, held)
        for p in bias:
            uses.over(p)
            how.receiver.arrived(p, how.gradients.of_bias(gy))
        if how.later is not None:
            how.later(weight, make)
        return gx, None, None
