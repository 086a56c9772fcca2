"""The modules of a parallel model: they have the classes and attributes of the original's, and never run.

``print(model)``, ``isinstance(model.a, nn.Linear)``, ``model.config`` and the model's own methods work as on
one device. A module within a parallel model holds pieces of parameters, and the program has its operators:
calling it is refused, and so are the few methods that could only be wrong, such as ``generate``. ``with
model.whole() as m`` gives the user's own module with whole weights; within that block the parallel model and
its modules run it too.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..frontend.trace.compiled import DYNAMO

WHOLE_HINT = "with model.whole() as m: ...  # the original's class with whole weights, on every rank"
# instance attributes that every module has for itself, or that would run the original
_OWN = frozenset({*nn.Module().__dict__, "forward", "__call__", "_compiled_call_impl", "_orig_mod"})
# a parallel model's modules take these from nn.Module rather than from the original: names and values must be
# the program's
_OF_STATES = ("get_extra_state", "set_extra_state", "_save_to_state_dict", "_load_from_state_dict")
_OF_THE_WHOLE = (
    "__call__", "__delattr__", "__setstate__", "state_dict", "load_state_dict", "parameters",
    "named_parameters", "buffers", "named_buffers", "children", "named_children", "modules", "named_modules",
    *_OF_STATES,
)  # fmt: skip
_REFUSED = ("generate", "save_pretrained", "push_to_hub")
NUMBERS = (bool, int, float, str)  # and strings
NOTHING = object()


class Shell(nn.Module):
    """A module within a parallel model."""

    # some classes (torchmetrics) compute these from tensors, which a shell does not have
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        lent = lent_part(self)
        if lent is not None:
            return lent(*args, **kwargs)
        raise InputError(
            "a module within a parallel model does not run by itself: the program runs the whole model",
            expected="a call of the parallel model",
            got=f"a call of its {self._get_name()}",
            hint=(
                "a forward that calls it, or a loss that does: mixmesh.prepare(..., loss=lambda out, y: "
                "criterion(net.head(out), y)), where net is the script's own model",
                f"without gradients: {WHOLE_HINT}",
            ),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        check_attribute(self, name, value)
        super().__setattr__(name, value)


def lent_part(shell: nn.Module) -> nn.Module | None:
    """The module of the script's own model that a shell stands for, while that model is lent."""
    return shell.__dict__["_lent"]() if "_lent" in shell.__dict__ else None


@dataclass(frozen=True, eq=False)
class Original:
    """The user's own module that a shell stands for. Copies of the shell stand for the same one.
    ``is_watched`` says whether changes of what a forward pass reads are seen: the first rank compares
    them, where it has traced the model."""

    module: nn.Module
    is_watched: Callable[[], bool]

    def __deepcopy__(self, memo: dict[int, Any]) -> Original:
        return self


def check_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Sets a new number or string, or a collection equal to the old one, on the original too: every call
    compares the numbers that a forward pass reads there, and traces again if one differs. Raises InputError
    for any other new value, as the program was planned with the old one."""
    planned, original = module.__dict__.get("_planned_attributes", {}), module.__dict__.get("_stands_for")
    of_class = NOTHING if original is None else _of_class(type(original.module), name)
    before = planned.get(name, of_class)
    if before is NOTHING or value is before or (_is_plain(value) and _is_equal(value, before)):
        return
    are_numbers = type(value) in NUMBERS and type(before) in NUMBERS
    if original is not None and (_is_equal(value, before) or (are_numbers and original.is_watched())):
        setattr(original.module, name, value)
        planned[name] = value
    else:
        raise InputError(
            f"{module._get_name()}.{name} was planned: another value would change nothing",
            expected=f"{name} = {before!r}",
            got=f"{name} = {value!r}",
            hint=(
                "set it before planning, plan again, and parallelize that",
                "for update_bn of an average: with mixmesh.whole(average) as m: average = copy.deepcopy(m)",
            )
            if name == "momentum"
            else "set it before planning, plan again, and parallelize that",
        )


def _of_class(kind: type, name: str) -> Any:
    """A value that a class of the user has for all its modules; NOTHING for methods, properties, and names
    that every module has."""
    value = inspect.getattr_static(kind, name, NOTHING)
    return NOTHING if hasattr(nn.Module, name) or hasattr(type(value), "__get__") else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*NUMBERS, type(None)))


def _is_equal(value: Any, other: Any) -> bool:
    """Whether two numbers or strings, or collections of them, are alike. Other objects, such as tensors, are
    not compared."""
    if type(value) is not type(other):
        return False
    if isinstance(value, SimpleNamespace):
        return _is_equal(vars(value), vars(other))
    if isinstance(value, dict):
        return _is_equal(list(value.items()), list(other.items()))
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    return _is_plain(value) and value == other


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The instance attributes of a module that are not tensors, and that not every module has."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in _OWN and not isinstance(value, Tensor)
    }


def shell_of(original: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """A shell of a module and of all modules within it, without tensors. Modules in ``known`` already have
    one."""
    if original not in known:
        kind: type = type(original)
        shell: nn.Module = nn.Module.__new__(_class_of(kind))
        nn.Module.__init__(shell)
        known[original] = shell
        dress(shell, original, known)
    return known[original]


def dress(shell: nn.Module, original: nn.Module, known: dict[nn.Module, nn.Module]) -> None:
    """Gives a shell the attributes and modules of its original, and the places of its tensors."""
    attributes = {name: value for name, value in attributes_of(original).items() if _is_free(shell, name)}
    shell.__dict__.update(
        attributes,
        training=original.training,
        _planned_attributes=dict(attributes),
    )
    for name, child in original._modules.items():
        shell._modules[name] = None if child is None else shell_of(child, known)
    shell._parameters.update(dict.fromkeys(original._parameters))
    shell._buffers.update(dict.fromkeys(original._buffers))
    shell._non_persistent_buffers_set.update(original._non_persistent_buffers_set)


def _is_free(shell: nn.Module, name: str) -> bool:
    """Whether an attribute of the original conflicts with no attribute of a parallel model."""
    kind: type = type(shell)
    return isinstance(shell, Shell) or name not in _reserved(kind)


@lru_cache
def _reserved(kind: type) -> frozenset[str]:
    return frozenset(
        name for base in kind.__mro__ if base.__module__.startswith("mixmesh.") for name in vars(base)
    )


@lru_cache
def _class_of(original: type) -> type:
    if issubclass(original, Shell):  # the class of a copy
        return original
    return _derived(Shell, original, {name: getattr(nn.Module, name) for name in _OF_STATES})


@lru_cache
def parallel_class(base: type, original: type) -> type:
    """``base``, the class of parallel models, with the name, the methods and the class of the original."""
    kept = {name: getattr(nn.Module, name) for name in _OF_THE_WHOLE if name not in vars(base)}
    refused = {name: _refusal(name) for name in _REFUSED if hasattr(original, name)}
    return _derived(base, original, kept | refused)


def _derived(base: type, original: type, extra: dict[str, Any]) -> type:
    members = {"__module__": original.__module__, "__qualname__": original.__qualname__, **extra}
    if not issubclass(original, torch.jit.ScriptModule) and original.__module__ != DYNAMO:
        try:
            return types.new_class(
                original.__name__, (base, original), exec_body=lambda ns: ns.update(members)
            )
        except TypeError:  # a class from which one cannot derive in this way
            pass
    return type(original.__name__, (base,), members)


class _Runtime(Protocol):
    @property
    def lent(self) -> nn.Module | None: ...


class _Parallel(Protocol):
    """A parallel model, whose class is in a module that imports this one."""

    _runtime: _Runtime


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: _Parallel, *args: Any, **kwargs: Any) -> Any:
        if (lent := self._runtime.lent) is not None:
            return getattr(lent, name)(*args, **kwargs)
        raise InputError(
            f"{name} needs the whole model, of which a rank holds a part",
            expected="a module with whole weights",
            got=f"{name} of a parallel model",
            hint=f"with model.whole() as m: m.{name}(...)  # on every rank; let rank 0 alone write files",
        )

    return refuse
