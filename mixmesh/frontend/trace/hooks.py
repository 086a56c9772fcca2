"""Hooks, which export drops: forward hooks that only change tensors are traced, all others are refused.

A forward hook runs while the model is traced, so its changes to tensors become part of the program, and so do
tensors that it keeps, where the loss reads them. All else that it does (inspecting, printing, counting) would
happen once and never in a step, and is refused. A hook on a gradient is no operator and cannot be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils import _pytree as pytree

from ...base.patch import patched
from ...errors import TraceError
from .locate import Place, place_of_function
from .reach import LENGTH, changed, reach
from .reads import hook_outside

GRADIENT_HINT = (
    "between loss.backward() and optimizer.step(): p.grad = f(p.grad) for p of the parallel model, where f "
    "takes each element by itself",
    "to scale a gradient within the model: x.detach() + factor * (x - x.detach())",
)
OF_PARAMETERS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
OF_MODULES = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
# hooks whose results the forward pass itself uses: weight norm, pruning, outputs of inner layers (router
# logits)
FOR_THE_FORWARD = ("torch.nn.utils.", "transformers.utils.output_capturing")
FORWARD = ("_forward_hooks", "_forward_pre_hooks")
OF_ALL_MODULES = {
    "_global_backward_hooks": "register_module_full_backward_hook",
    "_global_backward_pre_hooks": "register_module_full_backward_pre_hook",
}


def check_gradient_hooks(model: nn.Module) -> None:
    """Raises TraceError, with the hook's line, for a hook on the gradient of a parameter or of a module."""
    for name, p in model.named_parameters():
        _refuse_any(p, OF_PARAMETERS, f"parameter {name}")
    for name, module in model.named_modules():
        _refuse_any(module, OF_MODULES, f"module {name or type(module).__name__}")
    _refuse_any(modules, OF_ALL_MODULES, "all modules")


def _refuse_any(owner: Any, kinds: dict[str, str], name: str) -> None:
    for attribute, method in kinds.items():
        for hook in (getattr(owner, attribute, None) or {}).values():
            raise TraceError(
                "a hook on a gradient cannot be traced, and would not run",
                expected="gradients as autograd makes them",
                got=f"{method} on {name}",
                where=str(place_of_hook(hook)),
                hint=GRADIENT_HINT,
            )


def place_of_hook(hook: Any) -> Place:
    """The place where a hook is defined."""
    return place_of_function(_function(hook))


def _function(hook: Any) -> Any:
    hook = getattr(hook, "func", hook)  # unwraps a functools.partial
    return hook if hasattr(hook, "__code__") or hasattr(hook, "__func__") else type(hook).__call__


@contextmanager
def hooks_traced(model: nn.Module) -> Iterator[None]:
    """A context that raises TraceError if the forward pass puts a hook on a gradient, or if a forward hook
    changes no tensor and keeps none, or collects anything else."""
    check_gradient_hooks(model)
    held = [
        (hooks, key) for m in model.modules() for at in FORWARD for hooks in [getattr(m, at)] for key in hooks
    ]
    before = [hooks[key] for hooks, key in held]
    with ExitStack() as stack:
        for method in OF_PARAMETERS.values():
            stack.enter_context(patched(Tensor, method, _refusal_of(method)))
        for (hooks, key), hook in zip(held, before):
            hooks[key] = _observed(hook)
        try:
            yield
        finally:
            for (hooks, key), hook in zip(held, before):
                if key in hooks:
                    hooks[key] = hook


def _refusal_of(method: str) -> Callable[..., Any]:
    def register(tensor: Tensor, hook: Any) -> Any:
        raise TraceError(
            "a hook on a gradient cannot be traced, and would not run",
            expected="gradients as autograd makes them",
            got=f"{method} on a tensor of the forward pass",
            hint=GRADIENT_HINT[1],
        )

    return register


def _observed(hook: Any) -> Any:
    """Wraps a hook so that it raises TraceError if it changes no tensor and keeps none, or collects anything
    else. Tensors that it keeps are refused after the pass, unless the loss reads them."""
    if _function(hook).__module__.startswith(FOR_THE_FORWARD):
        return hook

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before, kept = _state(module, args, kwargs), reach(_function(hook), hook, module)
        has_left_all = hook_outside(hook)
        with _gradients_required() as required:
            result = hook(module, *args, **kwargs)
        after = reach(_function(hook), hook, module)
        names = changed(kept, after)
        if names and has_left_all(after.get(n) for n in names if not n.endswith(LENGTH)):
            return result
        if result is None and not required and _state(module, args, kwargs) == before:
            raise TraceError(
                "a forward hook that changes nothing would run once, while the model is traced, and never in "
                "a step",
                expected="forward hooks that change tensors, which become part of the program",
                got=f"a forward hook on {type(module).__name__} that returns nothing",
                where=str(place_of_hook(hook)),
                hint="take the hook off (handle.remove()) before planning, and look at the original model",
            )
        if names:
            raise TraceError(
                "a forward hook that collects would do so once, while the model is traced, never in a step",
                expected="forward hooks that change tensors, and keep nothing",
                got=f"a forward hook on {type(module).__name__} that changes {names[0]}",
                where=str(place_of_hook(hook)),
                hint="take out of the hook what collects, and look at the original model for that",
            )
        return result

    return run


@contextmanager
def _gradients_required() -> Iterator[list[Tensor]]:
    """A context that collects the tensors on which ``requires_grad_`` is called. A hook that calls it is
    allowed, although it changes no value: reentrant checkpoints need one."""
    original = Tensor.requires_grad_
    required: list[Tensor] = []

    def requires_grad_(tensor: Tensor, requires_grad: bool = True) -> Tensor:
        required.append(tensor)
        return original(tensor, requires_grad)

    with patched(Tensor, "requires_grad_", requires_grad_):
        yield required


def _state(module: nn.Module, args: tuple, kwargs: dict) -> list[Any]:
    """The state of the tensors that a hook may change: its arguments, and those of its module."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    held = [(name, id(x)) for each in (module._parameters, module._buffers) for name, x in each.items()]
    return [*((id(t), t._version, t.requires_grad) for t in tensors), *held]
