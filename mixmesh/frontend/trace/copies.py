"""Copies that stand in for a model, such as one that also computes its loss. The script may keep the
original, and go on to set attributes on it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .carried import holds_tensors, restore

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class _Link:
    """The original of a copy, and its attributes when the copy last took them."""

    original: weakref.ref[nn.Module]
    taken: dict[str, Any]


_LINKS: dict[int, _Link] = {}  # by id, because some modules compare by their tensors


def stand_for(copy: nn.Module, original: nn.Module) -> None:
    """Makes attributes that are set on ``original`` from now on count for a shallow ``copy`` of it."""
    original = original_of(original)
    _LINKS[id(copy)] = _Link(weakref.ref(original), _attributes(original))
    weakref.finalize(copy, _LINKS.pop, id(copy), None)


def original_of(module: nn.Module) -> nn.Module:
    """The module that a copy stands for; a module that is no copy itself."""
    link = _LINKS.get(id(module))
    original = None if link is None else link.original()
    return module if original is None else original


def take_attributes(copy: nn.Module) -> None:
    """Copies attributes that have been set on the original since the copy was made, except tensors and
    modules. Does nothing to a module that is not a copy."""
    link = _LINKS.get(id(copy))
    if link is None or (original := link.original()) is None:
        return
    for name, value in _attributes(original).items():
        if name not in link.taken or value is not link.taken[name]:
            vars(copy)[name] = link.taken[name] = value


@contextmanager
def shown_on_original(copy: nn.Module) -> Iterator[None]:
    """A context in which the original has the attributes where a call of the copy has left tensors, so that a
    loss reads them from the script's own model."""
    table = vars(original_of(copy))  # for a module that is not a copy its own, and then nothing differs
    before = dict(table)
    left = {
        name: value
        for name, value in vars(copy).items()
        if name not in _OF_EVERY_MODULE and value is not before.get(name) and holds_tensors(value)
    }
    table.update(left)
    try:
        yield
    finally:
        restore(table, left, before)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE and name != "forward" and not isinstance(value, Tensor)
    }
