"""Finds the functions that a forward pass or a loss may call, as far as their code names them, and the
outside values that they read: variables of a module, attributes of a script's own module or class
(``config.alpha``, ``CFG.alpha``).

A program runs none of this code, so these values are compared before every call. Only the script's own code
counts: libraries have many variables and rarely change them.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from ...base.callers import is_script

MOST_FUNCTIONS = 512  # limit on the functions that are followed


_FUNCTIONS = (FunctionType, MethodType, partial)


@dataclass(frozen=True)
class Names:
    """The names in a function's code: variables outside of the function, and attributes of any object."""

    of_globals: tuple[str, ...]
    attributes: frozenset[str]


def functions_of(module: nn.Module) -> Iterator[tuple[FunctionType, type | None]]:
    """Yields the functions that the forward pass of this very module may run, each with the class whose
    methods it calls: its ``forward``, those of its base classes, and functions among its attributes."""
    patched = vars(module).get("forward")
    if patched is not None:
        yield from plain_functions(patched)
    for base in type(module).__mro__:
        forward = vars(base).get("forward")
        if isinstance(forward, FunctionType):
            yield forward, type(module)
    for value in vars(module).values():
        if isinstance(value, _FUNCTIONS):
            yield from plain_functions(value)


def plain_functions(function: Any) -> Iterator[tuple[FunctionType, type | None]]:
    """Yields the function behind a callable, with the class whose methods it calls."""
    if isinstance(function, partial):
        yield from plain_functions(function.func)
    elif isinstance(function, MethodType):
        if isinstance(function.__func__, FunctionType):
            holder = function.__self__
            yield function.__func__, holder if isinstance(holder, type) else type(holder)
    elif isinstance(function, FunctionType):
        yield function, None
    elif isinstance(function, nn.Module):
        for module in function.modules():
            yield from functions_of(module)
    elif callable(function):  # an object
        kind: Any = type(function)
        if isinstance(kind.__call__, FunctionType):
            yield kind.__call__, kind


def bound_values(function: FunctionType | partial) -> Iterator[tuple[str, Any]]:
    """Yields the arguments that come with a function, those of a ``partial`` or its defaults, by name."""
    if isinstance(function, partial):
        yield from ((str(n), value) for n, value in enumerate(function.args))
        yield from function.keywords.items()
        return
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults)
    yield from (function.__kwdefaults__ or {}).items()


def all_called(first: Iterable[tuple[FunctionType, type | None]]) -> list[FunctionType]:
    """The given functions that are the script's own code, and the functions that they may call by name."""
    waiting, called = list(first), dict[int, FunctionType]()
    while waiting and len(called) < MOST_FUNCTIONS:
        function, owner = waiting.pop()
        if id(function) in called or not is_script(function.__code__.co_filename):
            continue
        called[id(function)] = function
        waiting += _callees(function, owner)
    return list(called.values())


def _callees(function: FunctionType, owner: type | None) -> Iterator[tuple[FunctionType, type | None]]:
    names, around = names_in(function.__code__), function.__globals__
    for value in (*(around.get(name) for name in names.of_globals), *_cells(function)):
        if isinstance(value, ModuleType) and is_own(value):
            for inner in names.attributes & vars(value).keys():
                yield from _functions_alone(vars(value)[inner])
        else:
            yield from _functions_alone(value)
    if owner is not None:
        for name in names.attributes:
            member = getattr(owner, name, None)
            member = member.fget if isinstance(member, property) else member
            if isinstance(member, FunctionType):
                yield member, owner


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is empty
            continue


def _functions_alone(value: Any) -> Iterator[tuple[FunctionType, type | None]]:
    """Like ``plain_functions``, but yields nothing for modules: they are watched as parts of the model."""
    if isinstance(value, FunctionType | MethodType | partial):
        yield from plain_functions(value)


def is_own(value: ModuleType | type) -> bool:
    """Whether a module or a class belongs to the script."""
    if isinstance(value, ModuleType):
        return is_script(getattr(value, "__file__", None) or "<none>")
    return is_own_class(value) and not issubclass(value, nn.Module)


def is_own_function(value: Any) -> bool:
    """Whether a value is a function of the script."""
    return isinstance(value, FunctionType) and is_script(value.__code__.co_filename)


def is_own_class(value: type) -> bool:
    """Whether a class belongs to the script; unlike for ``is_own``, also a class of modules."""
    module = sys.modules.get(value.__module__)
    return module is not None and is_own(module)


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    """The names that a piece of code, including code nested in it, reads."""
    of_globals: dict[str, None] = {}
    attributes: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            of_globals[step.argval] = None
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            attributes.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names = names_in(inner)
            of_globals.update(dict.fromkeys(names.of_globals))
            attributes |= names.attributes
    return Names(tuple(of_globals), frozenset(attributes))
