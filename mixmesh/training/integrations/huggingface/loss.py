"""The model together with the loss that its Trainer computes; the loss includes label smoothing,
``compute_loss_func``, ``num_items_in_batch`` and the ``compute_loss`` of a subclass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import transformers
from torch import nn

from ....frontend.trace.containers import DEPTH, MOST_ITEMS
from ....frontend.trace.copies import stand_for
from ....frontend.trace.reads import part_outside
from ....runtime.whole_model import IS_LENT, WITHOUT_LOSS
from .refusals import OF_TRAINING, in_compute_loss

NUM_ITEMS = "num_items_in_batch"
COLLECTIONS = list, dict, set
LIBRARIES = "transformers", "mixmesh"  # their classes keep nothing of a step


def with_trainer_loss(model: nn.Module, trainer: Any) -> nn.Module:
    """A form of ``model`` that takes a batch by name and returns what ``trainer.program_loss`` returns for
    it. The parameters, their names and the class name stay the model's own."""
    original = type(model)
    patched = vars(model).get("forward")

    def forward(self: nn.Module, *args: Any, **inputs: Any) -> Any:
        if self.__dict__.get(IS_LENT):
            return model(*args, **inputs)
        num_items = inputs.pop(NUM_ITEMS, None)
        plain = copy.copy(self)
        stand_for(plain, model)
        plain.__class__ = original
        if isinstance(patched, MethodType):
            plain.forward = MethodType(patched.__func__, plain)
        with _checked(trainer) as checked:
            return checked.program_loss(plain, inputs, num_items)

    wrapped = copy.copy(model)
    stand_for(wrapped, model)
    vars(wrapped).pop("forward", None)
    vars(wrapped)[WITHOUT_LOSS] = model
    wrapped.__class__ = type(original.__name__, (original,), {"forward": forward})
    return wrapped


@contextmanager
def _checked(trainer: Any) -> Iterator[Any]:
    """A copy of ``trainer`` that computes losses and refuses values that change from step to step. Numbers
    that the loss reads from it are compared at every call, as those of the model are.

    Raises InputError if its attributes were changed, since a program has no attributes.
    """

    def refuse(name: str, hint: str, *_: Any, **__: Any) -> Any:
        raise in_compute_loss(f"self.{name}", hint)

    kind = type(trainer)
    members = {name: property(partial(refuse, name, hint)) for name, hint in OF_TRAINING.items()}
    checked = copy.copy(trainer)
    # it belongs to a training step, which passes the batch to the model
    vars(checked).pop("compute_loss", None)
    checked.__class__ = type(kind.__name__, (kind,), members)
    functions = [checked.compute_loss, *filter(None, [checked.compute_loss_func])]
    part_outside("trainer", lambda: trainer, checked, functions)
    before = _contents(checked, kind)
    yield checked
    after = _contents(checked, kind)
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            raise in_compute_loss(
                f"self.{name} to keep something of every step",
                "a callback's on_step_end, or a buffer of the model that its forward updates in place",
            )


def _contents(trainer: transformers.Trainer, kind: type) -> dict[str, Any]:
    """The contents of each attribute of a Trainer, and of the script's own classes of Trainers: the id of the
    object, and for a collection the contents of its items."""
    of_classes = [vars(base) for base in kind.__mro__ if base.__module__.partition(".")[0] not in LIBRARIES]
    return {
        name: _content(value)
        for names in (*reversed(of_classes), vars(trainer))
        for name, value in names.items()
    }


def _content(value: Any, depth: int = DEPTH) -> tuple:
    if not isinstance(value, COLLECTIONS):
        return (id(value),)
    items = list(value.values() if isinstance(value, dict) else value)
    inner = (_content(x, depth - 1) for x in items[:MOST_ITEMS] if depth and isinstance(x, COLLECTIONS))
    return (id(value), len(items), *inner)
