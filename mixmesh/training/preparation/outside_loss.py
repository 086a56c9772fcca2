"""A model together with the loss that a script computes from its outputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn

from ...base.units import plural
from ...errors import InputError
from ...frontend.trace.copies import shown_on_original, stand_for, take_attributes
from ...frontend.trace.failures import within_loss
from ...frontend.trace.outputs import parts_of
from ...frontend.trace.reads import loss_outside
from ...lang.ir import Returned
from ...runtime.outputs import Output
from ...runtime.whole_model import IS_LENT, WITHOUT_LOSS


def with_loss(model: nn.Module, loss: Callable[..., Any], outputs: Collection[str | int] = ()) -> nn.Module:
    """A model that, called with a whole batch, returns ``loss(outputs, targets)``; if any ``outputs`` are
    requested, it returns an object with that ``.loss`` and everything that ``model`` returns: a tensor as
    ``.logits``, anything else under its own names. A call without targets then returns the outputs and no
    loss.

    From a batch ``(x, y)`` the model gets as many values as its forward pass takes, and the loss gets the
    rest after the outputs; optional arguments of the forward pass take no value that the loss needs. From a
    dict the loss gets, by name, what it requires, and the model everything that its forward pass has names
    for, even labels that both take. The remaining values go to the loss, or into ``**kwargs`` of the forward
    pass, if it has these.

    The parameters, their names and the class stay the model's own; a ``forward`` set on the object is called
    instead of the class's. Raises InputError if the forward pass does not name its arguments (``*args``, or
    only ``**kwargs``). A ``loss`` that is a module with parameters, or with buffers of its own, becomes a
    module of the model, named ``loss``.
    """
    original = type(model)
    names = input_names(model)
    takes_more = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    needed = needed_names(model)
    targets_named = needed_names(loss)[1:]  # without the first one, which takes the model's outputs
    needed_targets = len(targets_named)
    held = _name_for(loss, model)
    patched = vars(model).get("forward")
    own_forward = patched.__func__ if isinstance(patched, MethodType) else patched and _without_self(patched)

    def loss_in(module: nn.Module) -> Callable[..., Any]:
        return loss if held is None else getattr(module, held)  # a copy of the model has its own loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        take_attributes(self)
        if self.__dict__.get(IS_LENT):
            return (own_forward or original.forward)(self, *args, **kwargs)
        others = {n: x for n, x in kwargs.items() if n in targets_named or not (n in names or takes_more)}
        own = {n: x for n, x in kwargs.items() if n in names or n not in others}
        count = min(max(len(names) - len(own), 0), max(len(args) + len(others) - needed_targets, 0))
        count = max(count, len([name for name in needed if name not in own]))
        with _without(held, self):
            outputs_of_model = (own_forward or original.forward)(self, *args[:count], **own)
        targets = args[count:]
        if outputs and not _can_call(loss, outputs_of_model, *targets, **others):
            return _beside(None, outputs_of_model)  # evaluation without targets
        with shown_on_original(self), loss_outside(loss), within_loss():
            value = loss_in(self)(outputs_of_model, *targets, **others)
        return _beside(value, outputs_of_model) if outputs else value

    wrapped = copy.copy(model)
    wrapped.__dict__.pop("forward", None)
    wrapped.__dict__[WITHOUT_LOSS] = model
    stand_for(wrapped, model)
    if held is not None:
        wrapped.__dict__["_modules"] = {**model._modules, held: loss}
    wrapped.__class__ = type(original.__name__, (original,), {"forward": forward})
    return wrapped


@contextmanager
def _without(held: str | None, model: nn.Module) -> Iterator[None]:
    """A context in which ``model`` lacks the loss that is ``held`` under that name, because a Sequential runs
    all modules that it has."""
    if held is None:
        yield
        return
    every = model.__dict__["_modules"]
    model.__dict__["_modules"] = {name: module for name, module in every.items() if name != held}
    try:
        yield
    finally:
        model.__dict__["_modules"] = every


def _name_for(loss: Any, model: nn.Module) -> str | None:
    """The name under which a loss becomes a module of ``model``; None if it has neither parameters, which
    learn, nor buffers, which change. PyTorch's own losses never change their buffers: the program has these
    as constants, and the script may go on to call the loss."""
    if not isinstance(loss, nn.Module):
        return None
    is_of_torch = type(loss).__module__.startswith("torch.nn.")
    tensors = [*loss.parameters(), *(() if is_of_torch else loss.buffers())]
    of_model = {id(x) for x in (*model.parameters(), *model.buffers())}
    if all(id(x) in of_model for x in tensors):
        return None
    return next(name for name in ("loss", "criterion", "loss_function", "_loss") if not hasattr(model, name))


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that was set as an object's ``forward``, as a method."""
    return lambda self, *args, **kwargs: function(*args, **kwargs)


def _can_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a function accepts these arguments; True if that is unknown."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a function that is not written in Python
        return True
    return True


def _beside(loss: Any, made: Any) -> Output:
    """Joins the loss and the model's return value."""
    parts = [("logits", made)] if isinstance(made, Tensor) else parts_of(made)
    values = {"loss": loss, **{str(name): value for name, value in parts if str(name) != "loss"}}
    return Output(values, Returned(tuple(values)))


def needed_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the positional arguments that a function, or a module's forward pass, requires; none if
    unknown. A module may define ``__call__`` in place of a forward pass, as timm's JsdCrossEntropy does."""
    called = function
    if isinstance(function, nn.Module) and type(function).__call__ is nn.Module.__call__:
        called = function.forward
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:  # a function that is not written in Python
        return ()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in by_place and p.default is p.empty)


def check_has_targets(model: nn.Module, loss: Callable[..., Any], batch: Any) -> None:
    """Raises InputError for a tuple of values of which the model leaves none for the loss: one that compares
    outputs with the model's own input, as that of an autoencoder."""
    needed, targets = needed_names(model), needed_names(loss)[1:]
    if not isinstance(batch, tuple) or not len(needed) == len(batch) < len(needed) + len(targets):
        return
    names, given = ", ".join(needed), ", ".join((*needed, *targets))
    written = needed[0] if len(targets) == 1 else "..."
    raise InputError(
        "the loss needs a value of the batch, and the model takes all of them",
        expected=f"model({given}): first the values of the forward pass, then those of the loss",
        got=f"a batch of {plural(len(batch), 'value')}: {names}",
        hint=f"for a loss of the input: inputs=lambda {names}: ({names}, {written}), and "
        f"loss = model({names}, {written}) in the loop",
    )


def input_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the arguments that a model's forward pass takes from a batch."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    if not names or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise InputError(
            f"{type(model).__name__}.forward does not say which values of a batch it takes",
            expected="named arguments, so that the rest of a batch can go to the loss",
            got=f"forward{inspect.signature(model.forward)}",
            hint="a module of your own whose forward returns the loss, and no loss=",
        )
    return names
