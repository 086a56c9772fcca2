"""The parallel model as one node of autograd, from its parameters to the loss.

The program runs on tensors of its own (``inner``) that share memory with the parameters that are shown. Its
backward pass runs as a whole within that of the node, sums included, and hands each shown parameter its
finished gradient. So all that is outside of the model is as on one device: a penalty on the parameters adds
its gradient once, ``torch.autograd.grad`` gives finished gradients, hooks see them, and a frozen parameter
gets none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import MixmeshError
from .gradients import GradientReducer, Sums
from .shard_numbers import Off
from .shard_tensor import ShardTensor, shard


@dataclass(frozen=True)
class Inner:
    """Per shown parameter what the program has of it, and whether the program gives it a gradient."""

    shown: tuple[nn.Parameter, ...]
    inner: tuple[nn.Parameter, ...]
    learns: tuple[bool, ...]
    reducer: GradientReducer

    @classmethod
    def of(
        cls, pairs: Mapping[nn.Parameter, nn.Parameter], learning: set[int], reducer: GradientReducer
    ) -> Inner:
        """``learning``: ids of the inner parameters through which a gradient reaches the loss."""
        learns = tuple(id(p) in learning for p in pairs.values())
        return cls(tuple(pairs), tuple(pairs.values()), learns, reducer)

    def root(self, loss: Tensor) -> Tensor:
        """``loss``, made of the inner parameters, as one made of the shown ones."""
        with Off():
            return _Model.apply(self, [loss], loss.detach(), *self.shown)

    def backward(self, loss: Tensor, gradient: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """The finished gradients. Without sums over ranks (``no_sync``) those that lack them stay inside."""
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        loss.backward(gradient, retain_graph=keep)
        unsummed = set() if self.reducer.sums is Sums.ALL else self.reducer.summed_params
        out: list[Tensor | None] = []
        for p, mine, learns, wants in zip(self.shown, self.inner, self.learns, wanted):
            if id(mine) in unsummed:
                out.append(None)
                continue
            found, mine.grad = mine.grad, None
            if not (learns and wants):
                out.append(None)
                continue
            found = torch.zeros_like(mine) if found is None else found
            out.append(shard(found, p.whole) if isinstance(p, ShardTensor) else found)
        return out


class _Model(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inner: Inner, holder: list[Tensor], value: Tensor, *shown: Tensor):
        ctx.inner, ctx.holder = inner, holder
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        if torch.is_grad_enabled():
            raise MixmeshError(
                "the gradient of a parallel model has no gradient itself",
                expected="backward() and torch.autograd.grad without create_graph",
                got="create_graph=True",
                hint="compute a gradient penalty within the model's forward, or run that model on one device",
            )
        if not ctx.holder:
            raise MixmeshError(
                "this loss went backward before, and what it needs for that was let go of",
                expected="one backward pass for each call of the model",
                got="a second one",
                hint="loss.backward(retain_graph=True) in all but the last",
            )
        with Off():
            out = ctx.inner.backward(ctx.holder[0], gradient, ctx.needs_input_grad[3:])
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.holder.clear()
        return None, None, None, *out
