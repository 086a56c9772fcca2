"""Export of ``torch.autograd.Function``.

Export keeps the forward and silently drops the backward. So a Function is allowed only if its backward equals
what autograd derives from its forward, which is proved by execution. Others are refused: straight-through
estimators, clipped or reversed gradients.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from ...base.patch import patched
from ...errors import TraceError

SCALES = (1e-2, 1.0, 30.0)  # scales of inputs and gradients: a backward that clips differs at one of them
MAX_DIM = 7  # the largest dim of a probe: the gradients of an operator do not depend on its size
TOLERANCE = 1e-6

Function = type[torch.autograd.Function]


class _Context:
    """The ctx of a forward pass whose backward is never called."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass


def exact_functions() -> AbstractContextManager[None]:
    """A context in which a Function runs its forward, or raises TraceError if its backward is not the
    derivative of the forward."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Function, *args: Any, **kwargs: Any) -> Any:
        # an operator that is registered together with its gradient
        if cls.__module__.startswith("torch._library"):
            return original.__func__(cls, *args, **kwargs)
        if kwargs or not _backward_is_autograd(cls, original.__func__, args):
            raise refusal(cls)
        return _forward(cls, args)

    return patched(torch.autograd.Function, "apply", classmethod(apply))


def refusal(cls: type) -> TraceError:
    return TraceError(
        f"the custom backward of {cls.__name__} cannot be traced",
        expected="operators whose gradient PyTorch knows, or a backward equal to that",
        got=f"torch.autograd.Function {cls.__module__}.{cls.__qualname__}",
        hint=(
            "write its forward with ordinary operators (straight-through: x + (f(x) - x).detach())",
            "to reverse a gradient: (1 + a) * x.detach() - a * x",
            "for activation checkpointing use checkpoint(..., use_reentrant=False)",
        ),
    )


def _forward(cls: Function, args: tuple) -> Any:
    """Runs the forward with autograd's own derivative."""
    if cls.setup_context is not torch.autograd.Function.setup_context:
        return cls.forward(*args)
    return cls.forward(_Context(tuple(_differentiable(a) for a in args)), *args)


def _differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _backward_is_autograd(cls: Function, apply: Any, args: tuple) -> bool:
    """Whether the backward and autograd give equal gradients at random points, small and large, in
    float64."""
    if not any(map(_differentiable, args)):
        return False
    try:
        # real tensors, outside of the export's fake tensors
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
            return all(_agree(cls, apply, args, size, grad) for size in SCALES for grad in SCALES)
    except Exception:  # it does not run on a probe, so nothing can be said
        return False


def _agree(cls: Function, apply: Any, args: tuple, size: float, grad_size: float) -> bool:
    draw = torch.Generator().manual_seed(0)
    probes = [_probe(a, size, draw) for a in args]
    own = _gradients(apply(cls, *probes), probes, grad_size)
    # without mutations, as in a program: a forward may change in place what autograd would have kept
    forward = torch.func.functionalize(lambda *given: _forward(cls, given))
    plain = _gradients(forward(*probes), probes, grad_size)
    scale = max((float(g.abs().max()) for g in plain if g.numel()), default=0.0)
    return all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * scale) for a, b in zip(own, plain))


def _probe(arg: Any, size: float, draw: torch.Generator) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    shape = [min(int(n), MAX_DIM) for n in arg.shape]
    if arg.is_floating_point():
        return (size * torch.randn(shape, generator=draw, dtype=torch.float64)).requires_grad_()
    return torch.randint(0, 2, shape, generator=draw).to(arg.dtype)


def _gradients(result: Any, probes: list, grad_size: float) -> list[torch.Tensor]:
    results = [r for r in (result if isinstance(result, tuple) else (result,)) if _differentiable(r)]
    results = [r for r in results if r.requires_grad]
    inputs = [p for p in probes if _differentiable(p)]
    if not results:
        return [torch.zeros_like(p) for p in inputs]
    draw = torch.Generator().manual_seed(1)
    seeds = [grad_size * torch.randn(r.shape, generator=draw, dtype=r.dtype) for r in results]
    gradients = torch.autograd.grad(results, inputs, seeds, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, inputs)]
