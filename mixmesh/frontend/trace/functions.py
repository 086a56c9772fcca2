"""``torch.autograd.Function`` while a model is exported.

Export keeps the forward and silently drops the backward. So a Function is let through where its backward
is what autograd makes of its forward anyway, which is proved by execution, and refused where it is not:
straight-through estimators, clipped or reversed gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from ...errors import TraceError

SCALES = (1e-2, 1.0, 30.0)  # for inputs and gradients in turn: a backward that clips shows at one of them
MAX_DIM = 7  # for a probe; the gradients of an operator do not depend on its size
TOLERANCE = 1e-6


class _Context:
    """The ctx of a forward pass whose backward nobody will ask for."""

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


@contextmanager
def exact_functions() -> Iterator[None]:
    """Replace a Function by its forward, or raise TraceError if its backward is not the forward's own."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls, *args, **kwargs):
        if cls.__module__.startswith("torch._library"):  # an operator registered with its own gradient
            return original.__func__(cls, *args, **kwargs)
        if kwargs or not _backward_is_autograd(cls, original.__func__, args):
            raise refusal(cls)
        return _forward(cls, args)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


def refusal(cls: type) -> TraceError:
    return TraceError(
        f"the custom backward of {cls.__name__} cannot be traced",
        expected="operators whose gradient PyTorch knows, or a backward equal to that",
        got=f"torch.autograd.Function {cls.__module__}.{cls.__qualname__}",
        hint=(
            "write its forward with ordinary operators (straight-through: x + (f(x) - x).detach())",
            "for activation checkpointing use checkpoint(..., use_reentrant=False)",
        ),
    )


def _forward(cls: type, args: tuple) -> Any:
    """The forward with ordinary autograd."""
    if cls.setup_context is not torch.autograd.Function.setup_context:
        return cls.forward(*args)
    return cls.forward(_Context(tuple(_differentiable(a) for a in args)), *args)


def _differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _backward_is_autograd(cls: type, apply: Any, args: tuple) -> bool:
    """Both gradients agree at random points of small and large size, in float64."""
    if not any(map(_differentiable, args)):
        return False
    try:
        # real tensors, seen by neither the export nor its fake tensors
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
            return all(_agree(cls, apply, args, size, grad) for size in SCALES for grad in SCALES)
    except Exception:  # a Function that does not run on a probe proves nothing
        return False


def _agree(cls: type, apply: Any, args: tuple, size: float, grad_size: float) -> bool:
    draw = torch.Generator().manual_seed(0)
    probes = [_probe(a, size, draw) for a in args]
    own = _gradients(apply(cls, *probes), probes, grad_size)
    plain = _gradients(_forward(cls, tuple(probes)), probes, grad_size)
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
