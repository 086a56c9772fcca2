"""Finds numbers in a module's dicts, lists and objects, such as a configuration, that a forward pass reads.

Reads of a dict or a list cannot be observed. So a number in one counts if its key follows the dict's name in
the code, and all of its numbers count if the code uses it in any other way. An object's class is patched to
report each read while the forward pass runs.
"""

from __future__ import annotations

import argparse
import dis
import enum
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from ...base.callers import is_script
from .called import is_own, is_own_class
from .values import FUNCTIONS, GONE, Find, as_tuple, find_items, is_list, is_replaceable, is_simple

MOST_ITEMS = 256  # larger dicts and lists are not examined
DEPTH = 3  # levels of dicts and lists within each other that are examined for what a pass leaves there
DEPTH_OF_NUMBERS = 6  # levels that are examined for numbers
# libraries whose objects are not configurations: their numbers count the steps of a training
_NO_CONFIGURATIONS = frozenset(
    "torch mixmesh accelerate lightning pytorch_lightning lightning_fabric torchmetrics".split()
)
_MISSING = frozenset({"KeyError", "LookupError", "Exception"})  # caught by code that tries a key
# methods of a dict that may read any key
_READS_ALL = frozenset({"get", "items", "values", "keys", "copy", "pop", "popitem", "setdefault"})
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of a class: it was made by Python code; it must not be changed
# a function that notes (path, function that returns the current value, old value)
Note = Callable[[str, Find, Any], None]
Found = tuple[str, Find, Any]


@dataclass(frozen=True)
class Keys:
    """The keys of a dict that some code reads; any key if ``has_all``. Those that it reads even if they may
    be missing are ``asked``: a read in brackets only works once something has been written there."""

    names: frozenset[Any] = frozenset()
    has_all: bool = False
    asked: frozenset[Any] = frozenset()

    def __contains__(self, key: Any) -> bool:
        return self.has_all or key in self.names

    def may_be_missing_in(self, entries: dict[Any, Any]) -> frozenset[Any]:
        """The keys that are missing from ``entries`` and that the code can read all the same."""
        is_filled = self.has_all or hasattr(type(entries), "__missing__")
        return (self.names if is_filled else self.asked) - entries.keys()


EVERY_KEY = Keys(has_all=True)


@lru_cache(maxsize=1024)
def keys_read_by_class(kind: type, name: str) -> Keys:
    """The keys of the attribute ``name`` that methods of a module's class read."""
    members = [x for base in kind.__mro__ if base not in (nn.Module, object) for x in vars(base).values()]
    getters = [x.fget for x in members if isinstance(x, property)]
    return keys_read(name, *(x for x in (*members, *getters) if isinstance(x, FunctionType)))


def keys_read(name: str, *functions: FunctionType) -> Keys:
    """The keys that functions read from a value that they call ``name``: those in brackets behind the name,
    or all keys if it is used in any other way first."""
    each = [_keys_in(code, name) for f in functions for code in _codes_with(f.__code__, name)]
    names, asked = (frozenset().union(*sets) for sets in ([k.names for k in each], [k.asked for k in each]))
    return Keys(names, any(keys.has_all for keys in each), asked)


def keys_of_argument(name: str, function: FunctionType) -> Keys:
    """The keys that a function reads from its argument ``name``; any, if it has none of this name."""
    if name not in function.__code__.co_varnames:
        return EVERY_KEY
    keys = [_keys_in(code, name) for code in (function.__code__, *_codes_with(function.__code__, name))]
    return Keys(frozenset().union(*(k.names for k in keys)), any(k.has_all for k in keys))


def _keys_read_in(code: CodeType, name: str) -> Keys:
    """The keys that this very code reads from a value that it calls ``name``; any, if it does not name it."""
    keys = _keys_in(code, name) if _names(code, name) else Keys()
    return keys if keys != Keys() else EVERY_KEY


def _codes_with(code: CodeType, name: str) -> Iterator[CodeType]:
    """Yields the code, and code nested in it, that has a name which is no local variable."""
    if _names(code, name):
        yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes_with(inner, name)


def _names(code: CodeType, name: str) -> bool:
    return name in code.co_names or name in code.co_freevars


@lru_cache(maxsize=4096)
def _keys_in(code: CodeType, name: str) -> Keys:
    steps = [(x.opname, x.argval) for x in dis.get_instructions(code)]
    names, asked, has_all = set(), set(), False
    catches = not _MISSING.isdisjoint(code.co_names)
    for n, (operation, argument) in enumerate(steps):
        if argument != name or not operation.startswith("LOAD_"):
            continue
        (then, key), (later, second), *_ = [*steps[n + 1 : n + 3], ("", None), ("", None)]
        if then == "LOAD_CONST" and later.startswith("BINARY_"):  # name["key"]
            names.add(key)
            asked |= {key} if catches else set()
        elif then == "LOAD_CONST" and later == "STORE_SUBSCR":  # name["key"] = value
            continue
        elif then in ("LOAD_ATTR", "LOAD_METHOD") and key == "get" and later == "LOAD_CONST":
            names.add(second)
            asked.add(second)
        elif then in ("LOAD_ATTR", "LOAD_METHOD") and key not in _READS_ALL:
            names.add(key)  # name.key
        else:
            has_all = True
    return Keys(frozenset(names), has_all, frozenset(asked))


def is_container(value: Any) -> bool:
    """Whether to look for numbers within a value."""
    return (
        isinstance(value, dict | SimpleNamespace)
        or is_list(value)
        or is_plain_object(value)
        or is_shared(value)
    )


def is_shared(value: Any) -> bool:
    """Whether a value is a file or a class of the script, which may hold settings: ``self.cfg = CFG``."""
    return (isinstance(value, ModuleType) and is_own(value)) or (
        isinstance(value, type) and is_own_class(value)
    )


def is_plain_object(value: Any) -> bool:
    """Whether a value is an object of a class of the script or of a library that only holds other values."""
    kind = type(value)
    if not kind.__flags__ & _HEAP or kind.__flags__ & _IMMUTABLE:
        return False
    if isinstance(value, type) or (callable(value) and not is_own_class(kind)):
        return False
    if isinstance(value, nn.Module | Tensor | enum.Enum | dict | str | int | float) or is_list(value):
        return False
    root = kind.__module__.partition(".")[0]
    return kind is argparse.Namespace or not (root in sys.stdlib_module_names or root in _NO_CONFIGURATIONS)


def numbers_in(
    path: str, find: Find, value: Any, keys: Keys, depth: int = DEPTH_OF_NUMBERS
) -> Iterator[Found]:
    """Yields path, function that finds it, and value for each number, string, function or tensor in a dict or
    a list, and for each object, class and file of the script in them. A list of numbers counts as one
    value."""
    if _is_one(value):
        yield path, find, value
    elif not depth or not is_container(value):
        return
    elif isinstance(value, dict | SimpleNamespace):
        yield from _in_entries(path, find, value, keys, depth)
    elif isinstance(value, np.ndarray) or (len(value) <= MOST_ITEMS and all(map(_is_compared, value))):
        yield path, find_items(find), as_tuple(value)
    elif isinstance(value, Sequence):
        if not any(isinstance(x, Tensor) for x in value):
            yield f"len({path})", _find_length(find), len(value)
        for n, item in enumerate(islice(value, MOST_ITEMS)):
            yield from numbers_in(f"{path}[{n}]", _find_item(find, n), item, EVERY_KEY, depth - 1)


def _in_entries(
    path: str, find: Find, value: dict | SimpleNamespace, keys: Keys, depth: int
) -> Iterator[Found]:
    is_dict = isinstance(value, dict)
    items: dict[Any, Any] = value if isinstance(value, dict) else vars(value)
    for key in list(items)[:MOST_ITEMS]:
        if key in keys:
            inner = f"{path}[{key!r}]" if is_dict else f"{path}.{key}"
            find_inner = _find_item(find, key) if is_dict else find_in_object(find, key)
            yield from numbers_in(inner, find_inner, items[key], EVERY_KEY, depth - 1)
    if keys.has_all and items and all(map(is_replaceable, items.values())):
        yield f"keys of {path}", find_items(find), tuple(items)
    for key in sorted(keys.may_be_missing_in(items) if is_dict else (), key=str):
        yield f"{path}[{key!r}]", _find_item(find, key), GONE  # it may be set later


def _is_compared(value: Any) -> bool:
    return is_simple(value) or is_replaceable(value)


def _is_one(value: Any) -> bool:
    """Whether a value is noted as it is, and not what is in it."""
    return _is_compared(value) or isinstance(value, Tensor) or is_plain_object(value) or is_shared(value)


class ObjectWatch:
    """Records which attributes are read from the watched objects and from objects inside them."""

    def __init__(self, note: Note) -> None:
        self._note = note
        # by id; holds the object, so that its id stays its own
        self._places: dict[int, tuple[str, Find, Any]] = {}
        self._patched: dict[Any, Any] = {}  # by class, the class's own method before it was patched
        self._is_noting = False

    def show(self, path: str, find: Find, value: Any) -> None:
        """Watches an object that is found at this path."""
        if id(value) in self._places:
            return
        self._places[id(value)] = path, find, value
        kind: Any = type(value)
        if kind not in self._patched:
            self._patched[kind] = vars(kind).get("__getattribute__")
            kind.__getattribute__ = self._telling(kind.__getattribute__)

    def _telling(self, get: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def attribute(of: Any, name: str) -> Any:
            try:
                value = get(of, name)
            except AttributeError:
                if not self._is_noting and id(of) in self._places and not name.startswith("__"):
                    self._missing(of, name)
                raise
            is_told = not name.startswith("__") or name == "__dict__"
            if not self._is_noting and id(of) in self._places and is_told:
                self._is_noting = True
                try:
                    self._read(of, name, value)
                finally:
                    self._is_noting = False
            return value

        return attribute

    def _missing(self, of: Any, name: str) -> None:
        """Notes an attribute that may be set later, unless the class finds it by ``__getattr__``."""
        path, find, _ = self._places[id(of)]
        find_inner = find_in_object(find, name)
        self._is_noting = True
        try:
            if find_inner() is GONE:
                self._note(f"{path}.{name}", find_inner, GONE)
        finally:
            self._is_noting = False

    def _read(self, of: Any, name: str, value: Any) -> None:
        is_held = isinstance(value, FUNCTIONS) and name in getattr(of, "__dict__", {})
        if not (is_simple(value) or isinstance(value, Tensor) or is_container(value) or is_held):
            return
        if _is_computed(type(of), name):
            return
        path, find, _ = self._places[id(of)]
        reader = sys._getframe(2).f_code
        if name == "__dict__":  # vars(args)
            for key, inner in list(value.items()) if is_script(reader.co_filename) else ():
                for each in numbers_in(f"{path}.{key}", find_in_object(find, key), inner, EVERY_KEY):
                    self.note(*each)
            return
        keys = _keys_read_in(reader, name)
        for each in numbers_in(f"{path}.{name}", find_in_object(find, name), value, keys):
            self.note(*each)

    def note(self, path: str, find: Find, value: Any) -> None:
        """Notes a number; starts to watch an object."""
        if is_plain_object(value):
            self.show(path, find, value)
        else:
            self._note(path, find, value)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context after which patched classes are restored."""
        try:
            yield
        finally:
            for kind, before in self._patched.items():
                if before is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = before
            self._patched.clear()


def _is_computed(kind: type, name: str) -> bool:
    """Whether an attribute is a property, which reads others."""
    return any(isinstance(vars(base).get(name), property | cached_property) for base in kind.__mro__)


def find_in_object(holder: Find, name: str) -> Find:
    def find() -> Any:
        of = holder()
        try:
            own = object.__getattribute__(of, "__dict__")
        except AttributeError:  # a class with slots
            return getattr(of, name, GONE)
        return own[name] if name in own else getattr(of, name, GONE)

    return find


def _find_item(holder: Find, key: Any) -> Find:
    def find() -> Any:
        try:
            return holder()[key]
        except (LookupError, TypeError):
            return GONE

    return find


def _find_length(holder: Find) -> Find:
    def find() -> Any:
        now = holder()
        return len(now) if is_list(now) else GONE

    return find
