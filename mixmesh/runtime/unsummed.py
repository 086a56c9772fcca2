"""Refuses to clip gradients that ``no_sync`` has left unsummed, and to step by them. ``p.grad`` does not have
them, so both would silently change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad

from ..base.callers import line_of_script
from ..base.patch import put_on
from ..errors import InputError

# the function that every clipping by norm calls, by whatever name it was imported, and that by value
NORM, BY_VALUE = "_get_total_norm", "clip_grad_value_"
_waiting: WeakSet[nn.Module] = WeakSet()  # models whose parameters' gradients may be left unsummed


def refuse_clipping(model: nn.Module, is_unsummed: Callable[[nn.Module], bool]) -> None:
    """Makes clipping refuse the gradients of ``model`` from now on, whenever it ``is_unsummed``."""
    _waiting.add(model)
    for owner, name in ((clip_grad, NORM), (clip_grad, BY_VALUE), (nn.utils, BY_VALUE)):
        function = getattr(owner, name)
        if not hasattr(function, "checks_sums"):
            put_on(owner, name, _checked(function, is_unsummed))


def _checked(function: Callable[..., Any], is_unsummed: Callable[[nn.Module], bool]) -> Callable[..., Any]:
    """``function`` of gradients, or of parameters with some. It is to fail before ranks meet in it: they may
    lack gradients of different parameters."""

    @wraps(function)
    def checked(given: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [given] if isinstance(given, Tensor) else list(given)
        taken = set(map(id, given))
        for model in _waiting:
            if is_unsummed(model) and (not given or not taken.isdisjoint(_ids(model))):
                raise _refusal("gradients are clipped", *CLIPPING)
        return function(given, *args, **kwargs)

    put_on(checked, "checks_sums", True)
    return checked


def _ids(model: nn.Module) -> Iterator[int]:
    """The ids of the parameters and of their gradients."""
    for p in model.parameters():
        yield id(p)
        yield id(p.grad)


def refuse_steps(optimizer: optim.Optimizer, is_unsummed: Callable[[], bool]) -> None:
    """Makes the optimizer refuse to step whenever gradients of its model are unsummed. A closure, which may
    run the last backward pass, is not looked into."""

    def check(_: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_closure = any(map(callable, (*args, *kwargs.values())))
        if is_unsummed() and not has_closure:
            raise _refusal("the optimizer steps by gradients", *STEPPING)

    optimizer.register_step_pre_hook(check)


CLIPPING = (
    "clip once for each optimizer step, after its last backward pass, outside of model.no_sync()",
    "leave model.no_sync() out, to clip what has accumulated after every backward pass",
)
STEPPING = (
    "the last backward pass before each step outside of model.no_sync(), which is for those before it",
    "leave model.no_sync() out, if every backward pass is followed by a step",
)


def _refusal(words: str, *hint: str) -> InputError:
    return InputError(
        f"{words} that no_sync has left unsummed: p.grad does not have them yet",
        expected="a backward pass outside of model.no_sync() before, which sums all gradients",
        got="gradients that wait for such a pass",
        where=line_of_script(),
        hint=hint,
    )
