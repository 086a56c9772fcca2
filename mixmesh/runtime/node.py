"""The parallel model as one node of autograd, from its parameters to the loss.

The program runs on its own tensors (``inner``), which share memory with the shown parameters. Its backward
pass runs as a whole within the node's, including the sums over ranks, and hands each shown parameter its
finished gradient. Everything outside of the model therefore works as on one device: a penalty on the
parameters adds its gradient once, ``torch.autograd.grad`` returns finished gradients, hooks see them, and a
frozen parameter gets none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import MixmeshError
from .gradients import GradientReducer, Sums
from .input_gradients import Given
from .shard_numbers import Off
from .shard_tensor import ShardTensor, shard


@dataclass(frozen=True)
class Inner:
    """For each shown parameter, the program's own tensor, and whether the program gives it a gradient."""

    shown: tuple[nn.Parameter, ...]
    inner: tuple[nn.Parameter, ...]
    learns: tuple[bool, ...]
    reducer: GradientReducer

    @classmethod
    def of(
        cls, pairs: Mapping[nn.Parameter, nn.Parameter], learning: set[int], reducer: GradientReducer
    ) -> Inner:
        """``learning`` has the ids of the inner parameters through which a gradient reaches the loss."""
        learns = tuple(id(p) in learning for p in pairs.values())
        return cls(tuple(pairs), tuple(pairs.values()), learns, reducer)

    def root(self, made: Sequence[Tensor], given: Sequence[Given] = ()) -> tuple[Tensor, ...]:
        """Connects results that were ``made`` from the inner parameters, and from the leaves of ``given``
        inputs, to the shown parameters and the script's own inputs."""
        values, inputs = (x.detach() for x in made), (x.outer for x in given)
        with Off():
            return _Model.apply(self, [*made], given, len(made), *values, *inputs, *self.shown)

    def backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Runs the program's backward pass and returns the finished gradients. Without sums over ranks
        (``no_sync``), unfinished gradients stay inside."""
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        pairs = [(x, g) for x, g in zip(roots, gradients, strict=True) if x.requires_grad]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs], retain_graph=keep)
        unsummed = set() if self.reducer.sums is Sums.ALL else self.reducer.summed_params
        out: list[Tensor | None] = []
        for p, mine, learns, wants in zip(self.shown, self.inner, self.learns, wanted):
            if id(mine) in unsummed:
                out.append(None)
                continue
            gradient, mine.grad = mine.grad, None
            if not (learns and wants):
                out.append(None)
                continue
            gradient = torch.zeros_like(mine) if gradient is None else gradient
            out.append(shard(gradient, p.whole) if isinstance(p, ShardTensor) else gradient)
        return out


class _Model(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inner: Inner, holder: list[Tensor], given: Sequence[Given], count: int, *tensors):
        ctx.inner, ctx.holder, ctx.given, ctx.count = inner, holder, given, count
        return tuple(x.view_as(x) if x.ndim else x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        if torch.is_grad_enabled():
            raise MixmeshError(
                "the gradient of a parallel model has no gradient itself",
                expected="backward() and torch.autograd.grad without create_graph",
                got="create_graph=True",
                hint=(
                    "a penalty without gradients of gradients, such as spectral norms, or clipped weights",
                    "or train this model on one device, without torchrun",
                ),
            )
        if not ctx.holder:
            raise MixmeshError(
                "backward() was called on this loss before, and its graph was freed",
                expected="one backward pass for each call of the model",
                got="a second one",
                hint="loss.backward(retain_graph=True) in all but the last",
            )
        with Off():
            wanted = ctx.needs_input_grad[len(ctx.needs_input_grad) - len(ctx.inner.shown) :]
            out = ctx.inner.backward(ctx.holder, gradients, wanted)
            of_inputs = [x.gradient() for x in ctx.given]
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.holder.clear()
        return *(None,) * (4 + ctx.count), *of_inputs, *out
