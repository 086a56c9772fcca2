"""Finds random number generators that a script made for itself, if its model, its data set, its collate
function or another of its functions leads to them: as attributes, in closures, and as variables of the
script's files.

Planning loads some samples. Afterwards the script's own generators continue from where they were, as the
process's do, so that masks and augmented samples are those of one device.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from .called import is_own, names_in

GENERATORS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
OF_PROCESS = random._inst, np.random.mtrand._rand  # type: ignore[attr-defined]
MOST = 20_000  # limit on the objects visited
MOST_ITEMS = 1000  # larger collections may be the data itself, and are not searched
_BUILTIN = types.BuiltinMethodType
_PLAIN = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type(None))


def generators_in(*roots: Any) -> list[Any]:
    """The generators that ``roots`` lead to, the nearest first, without those of the process."""
    of_process = {id(g) for g in (torch.default_generator, *OF_PROCESS)}
    waiting, visited = deque(roots), dict[int, Any]()
    generators = []
    while waiting and len(visited) < MOST:
        value = waiting.popleft()
        if isinstance(value, _PLAIN) or id(value) in visited:
            continue
        visited[id(value)] = value
        if not isinstance(value, GENERATORS):
            with suppress(Exception):  # examining an object may fail in any way
                waiting.extend(_parts(value))
        elif id(value) not in of_process and not isinstance(value, random.SystemRandom):
            generators.append(value)
    return generators


def states_of(generators: Sequence[Any]) -> list[tuple[str, Any]]:
    """The kind and the state of each generator."""
    return [(type(g).__name__, _state(g)) for g in generators]


def set_states(generators: Sequence[Any], states: list[tuple[str, Any]]) -> None:
    """Restores the result of ``states_of``, if the generators are of the same kinds in the same order."""
    if [type(g).__name__ for g in generators] != [kind for kind, _ in states]:
        return
    for generator, (_, state) in zip(generators, states):
        if isinstance(generator, torch.Generator | np.random.RandomState):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.bit_generator.state = state


def marks_of(generators: Sequence[Any]) -> str:
    """A text that changes when any of the generators draws."""
    states = (_state(g) for g in generators)
    return repr([s.tolist() if isinstance(s, torch.Tensor) else s for s in states])


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        name, keys, *rest = generator.get_state(legacy=True)
        return (name, np.asarray(keys).tolist(), *rest)
    return generator.bit_generator.state


def _parts(value: Any) -> Iterator[Any]:
    """The values that ``value`` leads to directly."""
    if isinstance(value, dict):
        yield from list(value.values())[:MOST_ITEMS]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from list(value)[:MOST_ITEMS]
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, _BUILTIN):  # self.draw = generator.random
        yield value.__self__
    elif isinstance(value, type):
        if is_own(value):
            yield from vars(value).values()
            yield from value.__mro__[1:]
    elif not isinstance(value, types.ModuleType):
        yield from getattr(value, "__dict__", {}).values()
        names = (name for base in type(value).__mro__ for name in vars(base).get("__slots__", ()))
        yield from (getattr(value, name, None) for name in names if isinstance(name, str))
        yield type(value)


def _parts_of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is empty
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    names, around = names_in(function.__code__), function.__globals__
    for value in (around.get(name) for name in names.of_globals):
        if isinstance(value, types.ModuleType):
            if is_own(value):
                yield from (vars(value)[name] for name in sorted(names.attributes & vars(value).keys()))
        else:
            yield value
