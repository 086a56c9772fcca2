"""Finds the functions that a forward pass or a loss may call, as far as their code names them, and the
outside values that they read: variables of a module, attributes of a script's own module or class
(``config.alpha``, ``CFG.alpha``).

A program runs none of this code, so these values are compared before every call. Only the script's own code
counts: libraries have many variables and rarely change them.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice, zip_longest
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from ...base.callers import is_script

MOST_FUNCTIONS = 512  # limit on the functions that are followed
MOST_ENTRIES = 64  # limit on the entries of a list, a dict or an object whose functions are followed
DEPTH = 3  # levels of such values within each other

_FUNCTIONS = (FunctionType, MethodType, partial)


@dataclass(frozen=True)
class Names:
    """The names in a function's code: variables outside of the function, attributes of any object, and files
    that it imports."""

    of_globals: tuple[str, ...]
    attributes: frozenset[str]
    imports: frozenset[str]

    def files(self, around: Mapping[str, Any]) -> Iterator[ModuleType]:
        """Yields the script's own files that the code imports; ``around`` are its global variables."""
        for name in sorted(self.imports):
            for full in (name, f"{around.get('__package__') or ''}.{name}"):
                file = sys.modules.get(full)
                if file is not None and is_own(file):
                    yield file


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
    kind: Any = type(module)
    names = names_of_class(kind)
    for name, value in vars(module).items():
        if isinstance(value, _FUNCTIONS):
            yield from plain_functions(value)
        elif name in names:
            yield from _functions_within(value, names)


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
        code = function.func.__code__ if isinstance(function.func, FunctionType) else None
        names = code.co_varnames[: code.co_argcount] if code is not None else ()
        for n, (name, value) in enumerate(zip_longest(names[: len(function.args)], function.args)):
            yield name or str(n), value
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
        wrapped = getattr(function, "__wrapped__", None)  # as of torch.no_grad, torch.compile
        if isinstance(wrapped, FunctionType):
            waiting.append((wrapped, owner))
        if id(function) in called or not is_own_function(function):
            continue
        called[id(function)] = function
        waiting += _callees(function, owner)
    return list(called.values())


def _callees(function: FunctionType, owner: type | None) -> Iterator[tuple[FunctionType, type | None]]:
    names, around = names_in(function.__code__), function.__globals__
    outside = (*(around.get(name) for name in names.of_globals), *_cells(function), *names.files(around))
    for value in (*outside, *(value for _, value in bound_values(function))):
        yield from _functions_within(value, names.attributes)
    if owner is not None:
        for name in names.attributes:
            yield from _methods(owner, name)


def _methods(owner: type, name: str) -> Iterator[tuple[FunctionType, type | None]]:
    """Yields what a class and its bases have under a name, as ``super()`` calls those of bases."""
    for base in owner.__mro__:
        member = vars(base).get(name)
        if isinstance(member, property):
            member = member.fget
        elif isinstance(member, cached_property):
            member = member.func
        elif isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if isinstance(member, FunctionType):
            yield member, owner


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is empty
            continue


def _functions_within(
    value: Any, names: frozenset[str], depth: int = DEPTH
) -> Iterator[tuple[FunctionType, type | None]]:
    """Yields the functions that code with these names of attributes may call of a value: itself, functions of
    a script's own file, methods of its classes and objects, and those in lists, dicts and objects. Modules
    are left out: they are watched as parts of the model."""
    if isinstance(value, _FUNCTIONS):
        yield from plain_functions(value)
        if isinstance(value, partial) and depth:
            yield from _functions_within([x for _, x in bound_values(value)], names, depth - 1)
    elif not depth or isinstance(value, nn.Module):
        return
    elif isinstance(value, dict | list | tuple):
        for inner in islice(value.values() if isinstance(value, dict) else value, MOST_ENTRIES):
            yield from _functions_within(inner, names, depth - 1)
    elif isinstance(value, ModuleType):
        for name in names & vars(value).keys() if is_own(value) else ():
            yield from _functions_within(vars(value)[name], names, depth - 1)
    else:
        yield from _methods_within(value, names, depth)


def _methods_within(
    value: Any, names: frozenset[str], depth: int
) -> Iterator[tuple[FunctionType, type | None]]:
    """Yields those methods of a class or an object, and those of the values in the object."""
    kind = value if isinstance(value, type) else type(value)
    if not is_own_class(kind):
        return
    for name in (*names, "__init__" if kind is value else "__call__"):
        yield from _methods(kind, name)
    if kind is not value:
        yield from _functions_within(getattr(value, "__dict__", {}), names, depth)


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


@lru_cache(maxsize=1024)
def names_of_class(kind: type) -> frozenset[str]:
    """The names of attributes that the code of a class of the script and of its bases reads."""
    members = [x for base in kind.__mro__ if is_own_class(base) for x in vars(base).values()]
    codes = [x.__code__ for x in members if isinstance(x, FunctionType)]
    return frozenset().union(*(names_in(code).attributes for code in codes))


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    """The names that a piece of code, including code nested in it, reads."""
    of_globals: dict[str, None] = {}
    attributes: set[str] = set()
    imports: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            of_globals[step.argval] = None
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            imports.add(step.argval)
    if "getattr" in of_globals:
        attributes |= {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names = names_in(inner)
            of_globals.update(dict.fromkeys(names.of_globals))
            attributes |= names.attributes
            imports |= names.imports
    return Names(tuple(of_globals), frozenset(attributes), frozenset(imports))
