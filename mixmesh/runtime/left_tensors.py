"""Attributes where the forward pass of a model leaves tensors for its caller: an auxiliary loss, the last
loss, maps of attention.

A program computes what the call returns, and sets no attributes. A parallel model and the script's own model
would show what was there before, such as 0.0, and a loop that adds it to the loss would train without it. So
both refuse to be asked, unless the script's own model is lent or traced.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn

from ..base.callers import is_script, line_of_script
from ..errors import InputError
from ..frontend.trace.copies import original_of
from .shells import lent_part

MISSING = object()
_USES = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg
    pos abs lt le eq ne gt ge and rand or ror xor rxor invert round contains setitem delitem bool float int
    index len iter getitem array format""".split()


class NotLeft:
    """The value of an attribute of the script's own model where only a call of that model leaves a tensor.
    Every use raises InputError; a copy is what was there ``before``."""

    def __init__(self, path: str, before: Any) -> None:
        self.path, self.before = path, before

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        flat = chain.from_iterable(x if isinstance(x, (list, tuple)) else (x,) for x in args)
        raise _refusal(next(x.path for x in flat if isinstance(x, NotLeft)), "the script's own model")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked for by libraries
            raise AttributeError(name)
        raise _refusal(self.path, "the script's own model")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class; ``isinstance(value, Tensor)`` of the script, which would leave out a term, is a use."""
        asking = sys._getframe(1).f_code
        if is_script(asking.co_filename) or asking is torch.is_tensor.__code__:
            raise _refusal(self.path, "the script's own model")
        return NotLeft

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(None if self.before is MISSING else self.before, memo)

    def __reduce__(self) -> Any:
        return copy.copy, (None if self.before is MISSING else self.before,)

    def __repr__(self) -> str:
        return f"NotLeft({self.path}, which a call of the parallel model does not set)"

    __hash__ = object.__hash__


def _refuse_use(value: NotLeft, *_: Any) -> NoReturn:
    raise _refusal(value.path, "the script's own model")


for _name in _USES:
    setattr(NotLeft, f"__{_name}__", _refuse_use)


@dataclass(frozen=True, eq=False)
class Place:
    """An attribute, by its ``path``: an entry ``name`` of a module's ``table``."""

    table: dict[str, Any]
    name: str
    path: str

    def hide(self) -> None:
        before = self.table.get(self.name, MISSING)
        if not isinstance(before, NotLeft):
            self.table[self.name] = NotLeft(self.path, before)

    def show(self) -> None:
        value = self.table.get(self.name)
        if not isinstance(value, NotLeft):
            return
        if value.before is MISSING:
            del self.table[self.name]
        else:
            self.table[self.name] = value.before


@dataclass(frozen=True)
class Left:
    """The attributes of the script's own model where its calls leave tensors. Those that are buffers are not
    among them: the script's own model has no buffers while a parallel one holds them."""

    places: tuple[Place, ...] = ()

    def hide(self) -> None:
        """Makes every use of them raise InputError. Also hides what the script has set since."""
        for place in self.places:
            place.hide()

    def show(self) -> None:
        """Gives them the values that they had."""
        for place in self.places:
            place.show()


def left_of(model: nn.Module, paths: Iterable[str], *, own: nn.Module) -> Left:
    """The attributes at ``paths`` of a traced ``model``, also where they are those of ``own``, the script's
    model without its loss, or of the object that a copy of it stands for."""
    modules = dict(model.named_modules())
    places = []
    for path in paths:
        owner, _, name = path.rpartition(".")
        holders = [modules[owner]] if owner in modules else []
        holders += [own, original_of(own)] if not owner else []
        places += [Place(m.__dict__, name, path) for m in holders if name not in m._buffers]
    return Left(tuple(places))


@contextmanager
def left_shown(model: nn.Module) -> Iterator[None]:
    """A context in which ``model`` can be traced: its attributes, and those of the object that it stands for,
    have the values that they had before they were hidden."""
    tables = [m.__dict__ for m in (*model.modules(), original_of(model))]
    hidden = Left(
        tuple(Place(t, name, v.path) for t in tables for name, v in t.items() if isinstance(v, NotLeft))
    )
    hidden.show()
    try:
        yield
    finally:
        hidden.hide()


def refuse_left(parallel: nn.Module, left: Iterable[str]) -> None:
    """Makes the modules of a parallel model refuse the attributes at these paths. While the whole model is
    lent, they have those of its last call."""
    names_by_owner: dict[str, list[str]] = {}
    for path in left:
        owner, _, name = path.rpartition(".")
        names_by_owner.setdefault(owner, []).append(name)
    modules = dict(parallel.named_modules())
    for owner, names in names_by_owner.items():
        if owner in modules:
            kind: type = type(modules[owner])
            members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            refused = {name: _refusing(f"{owner}.{name}".lstrip("."), name) for name in names}
            modules[owner].__class__ = type(kind.__name__, (kind,), {**members, **refused})


def _refusing(path: str, name: str) -> property:
    def get(module: nn.Module) -> Any:
        lent = _lent(module)
        if lent is not None:
            return getattr(lent, name)
        raise _refusal(path, "the parallel model")

    return property(get, lambda module, value: None)


def _refusal(path: str, model: str) -> InputError:
    return InputError(
        f"the forward pass leaves a tensor in {path}, and the program of a parallel model does not",
        expected="a value that the model returns, or that its loss reads",
        got=f"{path}, read from {model}",
        where=line_of_script(),
        hint=(
            "to train on it: add it to the loss that forward returns, or mixmesh.prepare(..., loss=lambda "
            f"out, y: criterion(out, y) + net.{path}), where net is the script's own model",
            "to look at it: return it from forward too, and mixmesh.prepare(..., outputs=(1,))",
            f"without gradients: with mixmesh.whole(model) as m: m(x), and within the block m.{path}",
        ),
    )


def _lent(module: nn.Module) -> nn.Module | None:
    runtime = module.__dict__.get("_runtime")
    return lent_part(module) if runtime is None else runtime.lent
