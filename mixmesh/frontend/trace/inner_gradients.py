"""Gradients that a forward pass computes itself: a gradient penalty, forces as gradients of an energy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...base.patch import patched
from ...errors import TraceError
from .derivatives import Unknown, gradients

_FUNCTORCH = os.path.join(os.path.dirname(torch.__file__), "_functorch")  # torch.func.grad, torch.func.vjp


def inner_gradients() -> AbstractContextManager[None]:
    """A context in which ``torch.autograd.grad`` of tensors of a forward pass gives operators of the pass.
    ``torch.func.grad`` raises TraceError, as does what cannot be written as operators."""
    plain = torch.autograd.grad

    def grad(
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[Tensor | None, ...]:
        if sys._getframe(1).f_code.co_filename.startswith(_FUNCTORCH):
            raise _refusal("torch.func.grad, or one of jacrev, hessian and vjp")
        if is_grads_batched:
            raise _refusal("torch.autograd.grad(..., is_grads_batched=True)")
        ends, starts = _several(outputs), _several(inputs)
        if not all(t.requires_grad for t in (*ends, *starts)):  # PyTorch's own error
            return plain(outputs, inputs, grad_outputs, allow_unused=allow_unused)
        weights = [None] * len(ends) if grad_outputs is None else _several(grad_outputs)
        try:
            slopes = gradients(ends, starts, weights)
        except Unknown as why:
            raise _refusal(f"torch.autograd.grad through {why}") from None
        if materialize_grads:
            slopes = [torch.zeros_like(x) if g is None else g for g, x in zip(slopes, starts)]
        if any(g is None for g in slopes) and not allow_unused:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
        # a copy, since a write to it, such as sign_(), is none to what has a gradient
        return tuple(g if g is None or create_graph else g.detach().clone() for g in slopes)

    return patched(torch.autograd, "grad", grad)


def _several(tensors: Any) -> Sequence[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _refusal(got: str) -> TraceError:
    return TraceError(
        "the forward pass computes gradients itself, in a way that cannot be traced",
        expected="operators, or torch.autograd.grad through operators whose second derivative PyTorch knows",
        got=got,
        hint=(
            "torch.autograd.grad(y.sum(), x, create_graph=True) in place of torch.func.grad",
            "write the derivative out, as operators of the forward pass",
            "torch.func.jvp and jacfwd are operators of the forward pass",
            "or train this model on one device, without torchrun",
        ),
    )
