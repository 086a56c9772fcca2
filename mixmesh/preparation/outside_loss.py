"""A model together with the loss that a script computes from its outputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import InputError

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def with_loss(model: nn.Module, loss: Callable[..., Any]) -> nn.Module:
    """``model`` called with a whole batch, returning ``loss(outputs, targets)``.

    Of a batch ``(x, y)`` as many values go to the model as its forward pass takes, the rest to the loss after
    the outputs; of a dict what the forward pass has names for, the rest to the loss by name. The parameters,
    their names and the class stay the model's own. Raises InputError where the forward pass does not say what
    it takes (``*args``, ``**kwargs``).
    """
    original = type(model)
    names = input_names(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = {name: value for name, value in kwargs.items() if name in names}
        others = {name: value for name, value in kwargs.items() if name not in names}
        count = max(len(names) - len(own), 0)
        outputs = original.forward(self, *args[:count], **own)
        return loss(outputs, *args[count:], **others)

    wrapped = copy.copy(model)
    wrapped.__class__ = type(original.__name__, (original,), {"forward": forward})
    return wrapped


def input_names(model: nn.Module) -> tuple[str, ...]:
    """The names of what a model's forward pass takes, without those that a batch cannot fill."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind in VARIADIC for p in parameters):
        raise InputError(
            f"{type(model).__name__}.forward does not say which values of a batch it takes",
            expected="named arguments, so that the rest of a batch can go to the loss",
            got=f"forward{inspect.signature(model.forward)}",
            hint="a module of your own whose forward returns the loss, and no loss=",
        )
    return tuple(p.name for p in parameters)
