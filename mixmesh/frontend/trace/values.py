"""Values that a program takes over as they are when the model is traced: numbers and strings, members of an
enum, numbers of NumPy, dtypes, and functions, which are told apart by what they are."""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from itertools import count
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

Find = Callable[[], Any]
SIMPLE = (bool, int, float, str, type(None))
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_OTHERS = (enum.Enum, np.generic, torch.dtype)
MOST_BYTES = 1 << 20  # larger arrays are not compared
_LISTS = (list, tuple, set, frozenset, deque)
# serial numbers of functions; an address is used again when a function is gone
_SERIALS: dict[int, int] = {}  # by id
_counted = count(1)


class Gone:
    """Stands for a value whose holder no longer exists, or does not have it yet."""

    def __repr__(self) -> str:
        return "nothing"


GONE = Gone()


def is_simple(value: Any) -> bool:
    """Whether a value is a number, a string or another one that is compared by its value."""
    return type(value) in SIMPLE or isinstance(value, _OTHERS)


def is_list(value: Any) -> bool:
    """Whether a value is a list, a set, a tuple, which may have names, or an array of NumPy."""
    if isinstance(value, np.ndarray):
        return value.nbytes <= MOST_BYTES and not value.dtype.hasobject
    return isinstance(value, _LISTS)


def is_same(now: Any, was: Any) -> bool:
    """Whether a simple value, a function or a tuple of these has not changed. Tensors are never compared."""
    if now is was or type(now) is not type(was):
        return now is was
    if isinstance(was, tuple):
        return len(now) == len(was) and all(map(is_same, now, was))
    return bool(now == was) and not isinstance(was, nn.Module)


def shown(value: Any) -> str:
    """Describes a value, in other words for each other value."""
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, MethodType):
        return f"{shown(value.__func__)} of {id(value.__self__)}"
    if isinstance(value, partial | FunctionType | nn.Module):
        return f"{getattr(value, '__name__', type(value).__name__)} (the {_serial(value)}. such value)"
    return repr(value)


def _serial(value: Any) -> int:
    if id(value) not in _SERIALS:
        _SERIALS[id(value)] = next(_counted)
        weakref.finalize(value, _SERIALS.pop, id(value), None)
    return _SERIALS[id(value)]


def is_replaceable(value: Any) -> bool:
    """Whether a script may put another value like this one in its place that computes something else: a
    function, or a module without parameters, such as a criterion."""
    return isinstance(value, FUNCTIONS) or (
        isinstance(value, nn.Module) and next(value.parameters(), None) is None
    )


def find_items(holder: Find) -> Find:
    """Returns a function that finds the entries of a list that is found by another one, as a tuple."""

    def find() -> Any:
        now = holder()
        return as_tuple(now) if is_list(now) or isinstance(now, dict) else now

    return find


def as_tuple(value: Any) -> tuple:
    """The entries of a list, the keys of a dict, or the type, shape and a digest of an array."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, blake2b(value.tobytes(), digest_size=8).hexdigest()
    return tuple(sorted(value, key=repr)) if isinstance(value, set | frozenset) else tuple(value)
