"""Export of ``torch.autograd.Function``.

Export keeps the forward and silently drops the backward. That is right if the backward equals what autograd
derives from the forward, which is proved by execution. Any other backward that is linear in the gradient,
such as that of a straight-through estimator or of a reversed gradient, is written out: ``y.detach() + t``.
Here ``t`` is a linear function of ``x - x.detach()``, so zero, and its derivative is the backward: it is the
transpose of the backward, which is the derivative of the backward for the gradient that it is given. A
backward that is not linear, such as one that clips, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree

from ...base.patch import patched
from ...errors import TraceError
from . import derivatives
from .derivatives import Unknown, written_out

SCALES = (1e-2, 1.0, 30.0)  # scales of inputs
# scales of gradients: a backward that clips differs at one of them, and one that adds something at 0
GRADIENT_SCALES = (0.0, 1e-6, 1e-2, 1.0, 30.0, 1e6)
MAX_DIM = 7  # the largest dim of a probe: the gradients of an operator do not depend on its size
TOLERANCE = 1e-6

Function = type[torch.autograd.Function]
_BATCH: ContextVar[tuple[Tensor, ...]] = ContextVar("tensors of the batch", default=())


class _Context:
    """The ctx of a forward pass whose backward is never called by autograd."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple = ()
        self.stopped: tuple[int, ...] = ()  # ids of results without a gradient

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.stopped = tuple(map(id, tensors))


@contextmanager
def batch_of(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context for the pass of a batch. A script may ask for gradients of ``tensors`` in a later step, of
    which the trace knows nothing."""
    token = _BATCH.set(tuple(tensors))
    try:
        yield
    finally:
        _BATCH.reset(token)


def exact_functions() -> AbstractContextManager[None]:
    """A context in which a Function runs as operators with the gradients of its backward, or raises
    TraceError."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Function, *args: Any, **kwargs: Any) -> Any:
        # an operator that is registered together with its gradient
        if cls.__module__.startswith("torch._library"):
            return original.__func__(cls, *args, **kwargs)
        if kwargs or not any(map(_differentiable, args)):
            raise refusal(cls)
        needed = tuple(map(_may_need_gradient, args))
        if not (torch.is_grad_enabled() and any(needed)):  # its backward never runs
            return _forward(cls, args, needed)
        if _has_gradients_of(cls, _forward, original.__func__, args, needed):
            return _forward(cls, args, needed)
        if not _has_gradients_of(cls, _with_own_backward, original.__func__, args, needed):
            raise refusal(cls)
        try:
            return _with_own_backward(cls, args, needed, written_out)
        except Unknown:
            raise refusal(cls) from None

    return patched(torch.autograd.Function, "apply", classmethod(apply))


def refusal(cls: type) -> TraceError:
    return TraceError(
        f"the custom backward of {cls.__name__} cannot be traced",
        expected="operators whose gradient PyTorch knows, or a backward that is linear in the gradient",
        got=f"torch.autograd.Function {cls.__module__}.{cls.__qualname__}",
        hint=(
            "write its forward with ordinary operators (straight-through: x + (f(x) - x).detach())",
            "a backward that clips is not linear: clip the gradients of parameters, after loss.backward()",
            "an auxiliary loss that has the gradient 1: add it to the loss that forward returns",
            "for activation checkpointing use checkpoint(..., use_reentrant=False)",
        ),
    )


def _forward(cls: Function, args: Sequence[Any], needed: tuple[bool, ...]) -> Any:
    """Runs the forward with autograd's own derivative."""
    return _forward_and_context(cls, args, needed)[0]


def _forward_and_context(
    cls: Function, args: Sequence[Any], needed: tuple[bool, ...]
) -> tuple[Any, _Context]:
    context = _Context(needed)
    if cls.setup_context is torch.autograd.Function.setup_context:
        result = cls.forward(context, *args)
    else:
        result = cls.forward(*args)
        cls.setup_context(context, tuple(args), result)
    results = result if isinstance(result, tuple) else (result,)
    own = tuple(r.detach() if id(r) in context.stopped else r for r in results)
    context.stopped = tuple(id(new) for new, r in zip(own, results) if id(r) in context.stopped)
    return own if isinstance(result, tuple) else own[0], context


def _run(function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    return function(*tensors)


def _with_own_backward(
    cls: Function, args: Sequence[Any], needed: tuple[bool, ...], run: Callable = _run
) -> Any:
    """Runs the forward, and gives its results with the derivative that the backward computes for the
    arguments that it is ``needed`` for. ``run`` calls a function that uses autograd."""
    result, context = _forward_and_context(cls, args, needed)
    results = list(result) if isinstance(result, tuple) else [result]
    learned = [_differentiable(r) and id(r) not in context.stopped for r in results]
    inputs = [a for a, is_needed in zip(args, needed) if is_needed]
    kept, spec = pytree.tree_flatten(vars(context))
    places = [i for i, value in enumerate(kept) if isinstance(value, Tensor)]
    # the backward's own, without the guard of @once_differentiable
    backward = getattr(cls.backward, "__wrapped__", cls.backward)

    def transposed(*tensors: Tensor) -> list[Tensor | None]:
        saved, deltas = tensors[: len(places)], tensors[len(places) :]
        values = [*kept]
        for place, value in zip(places, saved):
            values[place] = value
        again = _Context(context.needs_input_grad)
        vars(again).update(pytree.tree_unflatten(values, spec))
        seeds = [torch.zeros(r.shape, dtype=r.dtype, device=r.device) for r in results]
        wanted = [s.requires_grad_() for s, has_gradient in zip(seeds, learned) if has_gradient]
        gradients = backward(again, *seeds)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        of_inputs = [g for g, is_needed in zip(gradients, needed) if is_needed]
        return [_transpose(seed, of_inputs, deltas) for seed in wanted]

    tensors = [*(kept[i].detach() for i in places), *(x - x.detach() for x in inputs)]
    zeros = iter(run(transposed, tensors))
    own = tuple(_sum(r.detach(), next(zeros)) if has else r for r, has in zip(results, learned))
    return own if isinstance(result, tuple) else own[0]


def _transpose(seed: Tensor, of_inputs: Sequence[Tensor | None], deltas: Sequence[Tensor]) -> Tensor | None:
    """The derivative for ``seed`` of the gradients of inputs, times ``deltas``; None if no input has one. An
    input whose gradient is zeros, whatever ``seed`` is, depends on it too: zeros are not None."""
    total: Tensor | None = None
    for gradient, delta in zip(of_inputs, deltas):
        if gradient is None:
            continue
        part = None
        if gradient.requires_grad:
            (part,) = derivatives.grad(gradient, seed, delta, create_graph=True, allow_unused=True)
        part = (delta * 0).sum().to(seed.dtype) if part is None else part
        total = part if total is None else total + part
    return total


def _sum(value: Tensor, zero: Tensor | None) -> Tensor:
    return value if zero is None else value + zero


def _differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _may_need_gradient(x: Any) -> bool:
    """Whether a tensor has a gradient, or would have one if the script asked for those of the batch."""
    return _differentiable(x) and (x.requires_grad or derivatives.depends_on(x, _BATCH.get()))


def _has_gradients_of(
    cls: Function, run: Callable, apply: Any, args: tuple, needed: tuple[bool, ...]
) -> bool:
    """Whether ``run`` and the Function give equal gradients at random points, small and large, in float64."""
    try:
        # real tensors, outside of the export's fake tensors
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
            return all(
                _agree(cls, run, apply, args, needed, size, grad)
                for size in SCALES
                for grad in GRADIENT_SCALES
            )
    except Exception:  # it does not run on a probe, so nothing can be said
        return False


def _agree(
    cls: Function,
    run: Callable,
    apply: Any,
    args: tuple,
    needed: tuple[bool, ...],
    size: float,
    grad_size: float,
) -> bool:
    draw = torch.Generator().manual_seed(0)
    probes = [_probe(a, is_needed, size, draw) for a, is_needed in zip(args, needed)]
    own = _gradients(apply(cls, *probes), probes, grad_size)
    function: Callable = partial(run, cls, needed=needed)
    if run is _forward:
        # without mutations, as in a program: a forward may change in place what autograd would have kept
        function = torch.func.functionalize(function)
    plain = _gradients(function(probes), probes, grad_size)
    scale = max((float(g.abs().max()) for g in plain if g is not None and g.numel()), default=0.0)
    return all(_close(a, b, scale) for a, b in zip_longest(own, plain))


def _close(a: Tensor | None, b: Tensor | None, scale: float) -> bool:
    if a is None or b is None:  # none at all is not zeros: an optimizer leaves its parameter as it is
        return a is b
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * scale)


def _probe(arg: Any, is_needed: bool, size: float, draw: torch.Generator) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    shape = [min(int(n), MAX_DIM) for n in arg.shape]
    if arg.is_floating_point():
        return (size * torch.randn(shape, generator=draw, dtype=torch.float64)).requires_grad_(is_needed)
    return torch.randint(0, 2, shape, generator=draw).to(arg.dtype)


def _gradients(result: Any, probes: list, grad_size: float) -> list[Tensor | None]:
    results = [r for r in (result if isinstance(result, tuple) else (result,)) if _differentiable(r)]
    results = [r for r in results if r.requires_grad]
    inputs = [p for p in probes if _differentiable(p) and p.requires_grad]
    draw = torch.Generator().manual_seed(1)
    seeds = [grad_size * torch.randn(r.shape, generator=draw, dtype=r.dtype) for r in results]
    # all results, and each: a backward may see which of them have a gradient
    choices = [slice(None), *(slice(i, i + 1) for i in range(len(results)) if len(results) > 1)]
    return [
        gradient
        for chosen in choices
        if results
        for gradient in derivatives.grad(
            results[chosen], inputs, seeds[chosen], allow_unused=True, retain_graph=True
        )
    ]
