"""The objects that a function can write to besides its arguments: the variables of its closure, the globals
that it names, and the attributes of its object, if it is a method."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

DEPTH = 3  # levels of containers within each other that are followed
LENGTH = " (its length)"  # follows the name of a container whose entries are named too
MOST = 2000  # limit on the objects visited
PLAIN = (int, float, complex, str, bytes, bool, type(None))
CLOSED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, Tensor)
# tables of a module: changes of these are detected in another way
OF_MODULES = ("_parameters", "_buffers", "_modules")

Reached = dict[str, Any]  # objects, by the expression that leads to each


def reach(function: Any, hook: Any, module: nn.Module) -> Reached:
    """Collects everything to which a hook on ``module`` can write. ``function`` is the one that the hook
    runs."""
    reached: Reached = {}
    for name, root in _roots(function, hook):
        _visit(name, root, DEPTH, reached)
    _visit("the module", module, 1, reached)
    return reached


def changed(before: Reached, after: Reached) -> list[str]:
    """The names of the objects that were replaced. The length of a container is named by itself."""
    return [
        name
        for name in {**before, **after}
        if name not in before or name not in after or not _is_same(before[name], after[name])
    ]


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and (a == b or a != a))


def _roots(function: Any, hook: Any) -> Iterator[tuple[str, Any]]:
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                yield name, cell.cell_contents
            except ValueError:  # the variable is not assigned yet
                continue
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]
        for n, default in enumerate(function.__defaults__ or ()):
            yield f"default {n}", default
    if (owner := getattr(hook, "__self__", None)) is not None:
        yield "self", owner
    elif not isinstance(hook, types.FunctionType):
        yield "self", hook  # an object with __call__, or a functools.partial
        if isinstance(hook, partial):
            yield "arguments", hook.args
            yield "named arguments", hook.keywords


def _visit(name: str, value: Any, depth: int, reached: Reached) -> None:
    if len(reached) >= MOST:
        return
    reached[name] = value
    if depth == 0 or isinstance(value, (*PLAIN, *CLOSED)):
        return
    for part, inner in _parts(value):
        _visit(f"{name}{part}", inner, depth - 1, reached)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in list(value.items())[:MOST])
    elif isinstance(value, list | tuple | deque):
        yield LENGTH, len(value)
        yield from ((f"[{n}]", inner) for n, inner in enumerate(list(value)[:MOST]))
    elif isinstance(value, set | frozenset):
        yield " (its size)", len(value)
    elif isinstance(value, nn.Module):
        own = {k: v for k, v in vars(value).items() if k not in OF_MODULES and not k.endswith("_hooks")}
        yield from ((f".{key}", inner) for key, inner in own.items())
    elif hasattr(value, "__dict__"):
        yield from ((f".{key}", inner) for key, inner in vars(value).items())
