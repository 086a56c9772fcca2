"""The parallel model as one node of autograd, from its parameters to the loss.

The program runs on its own tensors (``inner``), which share memory with the shown parameters. Its backward
pass runs as a whole within the node's, including the sums over ranks, and hands each shown parameter its
finished gradient. Everything outside of the model therefore works as on one device: a penalty on the
parameters adds its gradient once, ``torch.autograd.grad`` returns finished gradients, hooks see them, and a
frozen parameter gets none.

A rank that is alone needs no node: it runs the program on the shown parameters themselves (``runs_alone``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MixmeshError
from ..lang.ir import Program, wgrad_of
from .acts import Acts
from .comm import Comm
from .earlier_gradients import EarlierGradients
from .gradients import GradientReducer, Sums
from .input_gradients import Given
from .redistribute import bind
from .sfb import is_sfb
from .shard_numbers import Off
from .shard_tensor import ShardTensor, shard


@dataclass(frozen=True)
class Inner:
    """For each shown parameter, the program's own tensor, and whether the program gives it a gradient. With
    ``others`` one without a gradient here gets zeros, as it may have one on another rank."""

    shown: tuple[nn.Parameter, ...]
    inner: tuple[nn.Parameter, ...]
    learns: tuple[bool, ...]
    reducer: GradientReducer
    others: bool
    acts: Acts
    earlier: EarlierGradients

    @classmethod
    def of(
        cls,
        pairs: Mapping[nn.Parameter, nn.Parameter],
        learning: set[int],
        reducer: GradientReducer,
        comm: Comm,
        acts: Acts,
        plan: Any,
    ) -> Inner:
        """``learning`` has the ids of the inner parameters through which a gradient reaches the loss."""
        learns = tuple(id(p) in learning for p in pairs.values())
        shown = tuple(pairs)
        earlier = EarlierGradients(plan, comm, shown)
        return cls(shown, tuple(pairs.values()), learns, reducer, comm.world_size > 1, acts, earlier)

    def root(
        self, made: Sequence[Tensor], given: Sequence[Given] = (), *, is_loss: bool = False
    ) -> tuple[Tensor, ...]:
        """Connects results that were ``made`` from the inner parameters, and from the leaves of ``given``
        inputs, to the shown parameters and the script's own inputs. ``is_loss``: the first is a loss."""
        values, inputs = (x.detach() for x in made), (x.outer for x in given)
        with Off():
            return _Model.apply(self, [*made], given, is_loss, len(made), *values, *inputs, *self.shown)

    def backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Runs the program's backward pass and returns the finished gradients. Without sums over ranks
        (``no_sync``), unfinished gradients stay inside."""
        pairs = [(x, g) for x, g in zip(roots, gradients, strict=True) if x.requires_grad]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs], retain_graph=_keeps_graph())
        unsummed = set() if self.reducer.sums is Sums.ALL else self.reducer.summed_params
        out: list[Tensor | None] = []
        for p, mine, learns, wants in zip(self.shown, self.inner, self.learns, wanted):
            if id(mine) in unsummed:
                out.append(None)
                continue
            gradient, mine.grad = mine.grad, None
            if not (learns and wants) or (gradient is None and not self.others):
                out.append(None)
                continue
            gradient = torch.zeros_like(mine) if gradient is None else gradient
            out.append(shard(gradient, p.whole) if isinstance(p, ShardTensor) else gradient)
        return out


class _Model(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, inner: Inner, holder: list[Tensor], given: Sequence[Given], is_loss: bool, count: int, *tensors
    ):
        ctx.inner, ctx.holder, ctx.given, ctx.count = inner, holder, given, count
        ctx.is_loss = is_loss
        return tuple(x.view_as(x) if x.ndim else x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        _check(is_freed=not ctx.holder)
        with Off():
            wanted = ctx.needs_input_grad[len(ctx.needs_input_grad) - len(ctx.inner.shown) :]
            ctx.inner.earlier.before_backward()
            ctx.inner.acts.in_backward(gradients[0] if ctx.is_loss else None)
            out = ctx.inner.backward(ctx.holder, gradients, wanted)
            of_inputs = [x.gradient() for x in ctx.given]
        if not _keeps_graph():
            ctx.holder.clear()
        return *(None,) * (5 + ctx.count), *of_inputs, *out


def runs_alone(program: Program, shown: Iterable[Tensor], comm: Comm) -> bool:
    """Whether this rank is alone, holds all parameters whole, and gets all their gradients from autograd."""
    if comm.world_size > 1 or any(isinstance(p, ShardTensor) for p in shown):
        return False
    return not any(
        bind(program, i, comm).communicates if i.is_redistribution else is_sfb(i) or wgrad_of(i)
        for i in program.instructions
    )


class _Alone(torch.autograd.Function):
    """The loss as it is; its backward pass refuses what the node's refuses."""

    @staticmethod
    def forward(ctx, loss: Tensor):
        ctx.is_freed = False
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        _check(is_freed=ctx.is_freed)
        ctx.is_freed = not _keeps_graph()
        return gradient


def rooted_alone(loss: Tensor) -> Tensor:
    """The ``loss`` of a rank that runs alone, with its graph."""
    return _Alone.apply(loss)


def _keeps_graph() -> bool:
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _check(*, is_freed: bool) -> None:
    """Raises MixmeshError, in a backward pass, if its graph was freed or its gradients are to have some."""
    if torch.is_grad_enabled():
        raise MixmeshError(
            "the gradient of a parallel model has no gradient itself",
            expected="backward() and torch.autograd.grad without create_graph",
            got="create_graph=True",
            hint=(
                "within the model it is right: prepare a module whose forward(x) calls the model, "
                "torch.autograd.grad(y.sum(), x, create_graph=True), and returns the loss",
                "a critic with a penalty: its forward returns the gradient beside the scores, "
                "x.requires_grad_(), y = net(x), return y, torch.autograd.grad(y.sum(), x, "
                "create_graph=True)[0], and the loop makes the penalty of it",
                "or a penalty without gradients of gradients, such as spectral norms, or clipped weights",
            ),
        )
    if is_freed:
        raise MixmeshError(
            "backward() was called on this loss before, and its graph was freed",
            expected="one backward pass for each call of the model",
            got="a second one",
            hint="loss.backward(retain_graph=True) in all but the last",
        )
