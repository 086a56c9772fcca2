"""Finds tensors that a forward pass or a loss leaves outside of the model's modules: in variables of the
script and of closures, in attributes of its objects and classes, and in lists and dicts of these.

A program leaves nothing there, so a loop that reads it would find what was there before: an empty list, or
0.0 in place of an auxiliary loss. What is computed from the batch or from what is trained is refused, unless
the loss reads it. All else, such as a mask that is made once, is only taken out again, since the tensors of
an export are of no use after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...base.callers import is_script
from ...errors import TraceError
from .attributes import TABLES
from .called import all_called, is_own, is_own_class, names_in, plain_functions
from .carried import is_computed, restore
from .containers import MOST_ITEMS, keys_read
from .copies import original_of
from .locate import place_of_function
from .symbolic import NUMBERS

DEPTH = 4  # levels of objects within each other that are followed
MOST_HOLDERS = 2000
COLLECTIONS = (list, deque)
_CACHED = type(lru_cache(lambda: None))
_CLOSED = (Tensor, nn.Module, ModuleType, FunctionType, MethodType, partial, _CACHED)
_IN_CELL = "cell_contents"


@dataclass(frozen=True)
class _Holder:
    """Something with entries: a list, a dict, the cell of a closure, or an object or class with its
    attributes. ``old`` are its entries from before the forward pass; ``function`` names it in its code."""

    path: str
    of: Any
    old: Mapping[Any, Any]
    function: FunctionType

    def name_of(self, key: Any) -> str:
        if not self.path:  # variables of a file
            return str(key)
        return self.path if isinstance(self.of, COLLECTIONS) else _inner(self.path, self.of, key)

    def left(self) -> dict[Any, Any]:
        """The entries that are new and hold tensors."""
        now = _entries(self.of)
        if isinstance(self.of, COLLECTIONS):
            known = set(map(id, self.old.values()))
            return {n: x for n, x in now.items() if id(x) not in known and _tensors_in(x)}
        return {n: x for n, x in now.items() if x is not self.old.get(n) and _tensors_in(x)}

    def put_back(self, left: Mapping[Any, Any]) -> None:
        """Gives the entries that are ``left`` their old values, and a dict what was taken out of it."""
        if isinstance(self.of, COLLECTIONS):
            if left:
                self.of.clear()
                self.of.extend(self.old.values())
            return
        slots = {} if isinstance(self.of, type | CellType | dict) else _slots(self.of)
        for key in left:
            if isinstance(self.of, type | CellType):
                setattr(self.of, key, self.old[key]) if key in self.old else delattr(self.of, key)
            elif key in slots:
                slot = slots[key]
                slot.__set__(self.of, self.old[key]) if key in self.old else slot.__delete__(self.of)
            else:
                restore(_table(self.of), [key], self.old)
        if isinstance(self.of, dict) and len(self.of) < len(self.old):
            self.of.update({key: x for key, x in self.old.items() if key not in self.of})


Caches = dict[int, tuple[Any, int]]  # functions with a cache, by id, and the misses before the pass
Left = tuple[_Holder, Any]  # a holder, and the name or the key of its entry


class LeftOutside:
    """The places outside of the modules of ``model`` where its forward pass, or a loss, may leave tensors."""

    def __init__(self, model: nn.Module, losses: list[Any]) -> None:
        """``losses`` holds the loss functions that passes of this model have called so far; this pass adds
        those that it calls."""
        self._model, self._losses = model, losses
        self._has_loss = False
        self._modules = {id(x) for each in model.modules() for x in (each, original_of(each))}
        self._held: dict[int, _Holder] = {}
        self._caches: Caches = {}
        self._read: set[tuple[int, Any]] = set()  # entries that a loss reads, by the id of their holder
        # by the id of a holder, the names of its entries that a function around the model reads; None for all
        self._free: dict[int, frozenset[str] | None] = {}
        self._hold(self._reached(model))

    def begins_loss(self, loss: Any) -> None:
        """Notes what the pass has left so far and the loss reads, and watches what the loss may write to."""
        self._has_loss = True
        if not any(loss is each for each in self._losses):
            self._losses.append(loss)
        reached = list(self._reached(loss))
        for holder, names in reached:
            if id(holder.of) in self._held:
                left = self._held[id(holder.of)].left()
                self._read |= {(id(holder.of), key) for key in left if names is None or key in names}
        self._hold(reached)

    def begins_hook(self, hook: Any) -> Callable[[Iterable[Any]], bool]:
        """Watches what a forward hook may write to. The returned function tells whether values are all
        tensors, or hold only tensors, that were left there, or in attributes of the model's modules."""
        reached = list(self._reached(hook))
        self._hold(reached)
        return partial(self._has_left_all, [self._held[id(holder.of)] for holder, _ in reached])

    def _has_left_all(self, holders: Iterable[_Holder], values: Iterable[Any]) -> bool:
        left = [x for holder in holders for x in holder.left().values()]
        for module in self._model.modules():
            left += [x for name, x in vars(module).items() if name not in TABLES]
        known = {id(x) for x in _tensors_in(left)}
        leaves = pytree.tree_leaves(list(values))
        return all(isinstance(x, Tensor) and id(x) in known for x in leaves)

    def has_part(self, function: Any) -> None:
        """Notes a function that runs the model as a part of it: it may read all that it names."""
        for holder, names in self._reached(function):
            self._free[id(holder.of)] = names

    def put_back(self) -> list[Left]:
        """Puts back what was in the places of new tensors. Returns those places whose tensors are computed
        and which no loss reads."""
        for loss in () if self._has_loss else self._losses:  # an evaluation without labels
            self.has_part(loss)
        left = [(holder, holder.left()) for holder in self._held.values()]
        lost = [
            (holder, key)
            for holder, entries in left
            for key, value in entries.items()
            if not self._is_read(holder, key) and is_computed(_tensors_in(value), self._model)
        ]
        for holder, entries in left:
            holder.put_back(entries)
        for cache, misses in self._caches.values():
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        return lost

    def _is_read(self, holder: _Holder, key: Any) -> bool:
        names = self._free.get(id(holder.of), frozenset())
        return (id(holder.of), key) in self._read or names is None or key in names

    def _hold(self, reached: Iterable[tuple[_Holder, Any]]) -> None:
        for holder, _ in reached:
            self._held.setdefault(id(holder.of), holder)

    def _reached(self, root: Any) -> Iterator[tuple[_Holder, frozenset[str] | None]]:
        """Yields each holder that functions of a model or of a loss may write to, with the names of those of
        its entries that they name; None for all."""
        walk = _Walk(self._modules, self._caches)
        called = all_called(plain_functions(root))
        for function in called:
            walk.around(function)
        if called:
            walk.root(root, next((each for each in called if each.__name__ == "forward"), called[0]))
        for held in walk.found.values():
            yield held, walk.names.get(id(held.of))


class _Walk:
    """A walk through what functions name. ``modules`` are the ids of those of the model, in whose attributes
    tensors may be left."""

    def __init__(self, modules: set[int], caches: Caches) -> None:
        self.found: dict[int, _Holder] = {}
        # by the id of a file's variables or of a dict: the names of entries that functions read; None for all
        self.names: dict[int, frozenset[Any] | None] = {}
        self._modules, self._caches = modules, caches
        self._seen: set[int] = set()

    def around(self, function: FunctionType) -> None:
        """Visits the variables of a function's closure and file that its code names."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._enter(name, cell, function)
            for value in _entries(cell).values():
                self.visit(name, value, function)
                self._keys(name, value, function)
        variables, names = function.__globals__, names_in(function.__code__)
        self._enter("", variables, function)
        self._also(variables, names.of_globals)
        for name in names.of_globals:
            self._variable(name, variables.get(name), names.attributes, function)

    def _variable(self, name: str, value: Any, used: frozenset[str], function: FunctionType) -> None:
        if isinstance(value, ModuleType) and is_own(value):
            self._enter(name, vars(value), function)
            self._also(vars(value), used)
            for inner in used & vars(value).keys():
                self.visit(f"{name}.{inner}", vars(value)[inner], function)
        else:
            self.visit(name, value, function)
            self._keys(name, value, function)

    def _keys(self, name: str, value: Any, function: FunctionType) -> None:
        """Notes the keys of a dict that a function reads."""
        if isinstance(value, dict):
            keys = keys_read(name, function)
            reads_all = keys.has_all or any(hasattr(dict, str(key)) for key in keys.names)
            self._also(value, None if reads_all else keys.names)

    def _also(self, holder: Any, names: Iterable[Any] | None) -> None:
        before = self.names.get(id(holder), frozenset())
        self.names[id(holder)] = None if names is None or before is None else before | frozenset(names)

    def root(self, root: Any, function: FunctionType) -> None:
        """Visits a model; a loss, if it is a module or a method, with its object."""
        if isinstance(root, nn.Module) and id(root) not in self._modules:
            self._enter(type(root).__name__, root, function)
            self._seen.discard(id(root))
        owner = getattr(root, "__self__", root)
        self.visit("" if id(owner) in self._modules else type(owner).__name__, owner, function)

    def visit(self, path: str, value: Any, function: FunctionType, depth: int = DEPTH) -> None:
        """Notes a value as a holder, if it is one, and those within it."""
        if id(value) in self._seen or not depth or len(self.found) > MOST_HOLDERS:
            return
        if isinstance(value, nn.Module):
            self._module(path, value, function, depth)
        elif isinstance(value, MethodType):
            self.visit(path, value.__self__, function, depth)
        elif isinstance(value, staticmethod | classmethod):
            self.visit(path, value.__func__, function, depth)
        elif isinstance(value, partial):
            self.visit(path, [value.func, *value.args, *value.keywords.values()], function, depth)
        elif isinstance(value, _CACHED):
            self._caches.setdefault(id(value), (value, value.cache_info().misses))
        elif isinstance(value, tuple) or _is_holder(value):
            if not isinstance(value, tuple):
                self._enter(path, value, function)
            entries = self.found[id(value)].old if id(value) in self.found else _entries(value)
            for key, inner in islice(entries.items(), MOST_ITEMS):
                self.visit(_inner(path, value, key), inner, function, depth - 1)

    def _module(self, path: str, module: nn.Module, function: FunctionType, depth: int) -> None:
        for name, each in module.named_modules():
            if id(each) in self._seen:
                continue
            function = _forward_of(each) or function
            is_outside = id(each) not in self._modules and is_own_class(type(each))
            if is_outside:
                self._enter(".".join(part for part in (path, name) if part), each, function)
            self._seen.add(id(each))
            visit = self.visit if is_outside else self._attribute
            for key, value in vars(each).items():
                if key not in TABLES and not isinstance(value, nn.Module):
                    inner = ".".join(part for part in (path, name, key) if part)
                    visit(inner, value, function, depth - 1)
            self._class(type(each), function)

    def _attribute(self, path: str, value: Any, function: FunctionType, depth: int) -> None:
        """Visits an attribute of a module. Lists and dicts there are compared as its attributes, and only
        objects within them are visited."""
        if depth <= 0:
            return
        if isinstance(value, (dict, *COLLECTIONS)):
            for key, inner in islice(_entries(value).items(), MOST_ITEMS):
                self._attribute(_inner(path, value, key), inner, function, depth - 1)
        else:
            self.visit(path, value, function, depth)

    def _class(self, kind: type, function: FunctionType) -> None:
        for base in kind.__mro__:
            if is_own_class(base) and id(base) not in self._seen:
                self.visit(base.__name__, base, function)

    def _enter(self, path: str, holder: Any, function: FunctionType) -> None:
        if id(holder) not in self._seen:
            self._seen.add(id(holder))
            self.found[id(holder)] = _Holder(path, holder, _entries(holder), function)
            if not isinstance(holder, type) and _is_object(holder):
                self._class(type(holder), function)


def _forward_of(module: nn.Module) -> FunctionType | None:
    """The forward method of a module's class, if the script defines it."""
    forward: Any = type(module).forward
    return forward if isinstance(forward, FunctionType) and is_script(forward.__code__.co_filename) else None


def _entries(of: Any) -> dict[Any, Any]:
    """A copy of the entries of a holder, by name or key, or by place in a list."""
    if isinstance(of, CellType):
        try:
            return {_IN_CELL: of.cell_contents}
        except ValueError:  # the variable is not assigned yet
            return {}
    if isinstance(of, (tuple, *COLLECTIONS)):
        return dict(enumerate(of))
    return dict(_table(of)) if isinstance(of, type | dict) else {**_table(of), **dict(_filled(of))}


def _table(of: Any) -> Any:
    """The attributes of an object, whatever its class says of them; a dict itself."""
    if isinstance(of, dict):
        return of
    try:
        return object.__getattribute__(of, "__dict__")
    except AttributeError:  # its class has __slots__ alone
        return {}


def _slots(of: Any) -> dict[str, Any]:
    """The places of those attributes of an object that classes of the script name in ``__slots__``."""
    bases = [base for base in type(of).__mro__ if is_own_class(base)]
    members = [item for base in bases for item in vars(base).items()]
    return {name: each for name, each in members if isinstance(each, MemberDescriptorType)}


def _filled(of: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each such attribute that is assigned."""
    for name, slot in _slots(of).items():
        try:
            yield name, slot.__get__(of)
        except AttributeError:  # not assigned
            continue


def _is_holder(value: Any) -> bool:
    is_class = isinstance(value, type) and is_own_class(value)
    return is_class or isinstance(value, (dict, *COLLECTIONS)) or _is_object(value)


def _is_object(value: Any) -> bool:
    """Whether a value is an object of the script, with attributes."""
    if isinstance(value, (type, *_CLOSED)):
        return False
    return isinstance(value, SimpleNamespace) or is_own_class(type(value))


def _inner(path: str, holder: Any, key: Any) -> str:
    """The path of an entry of a holder."""
    if isinstance(holder, (dict, tuple, *COLLECTIONS)):
        return f"{path}[{key!r}]"
    return path if isinstance(holder, CellType) else f"{path}.{key}".lstrip(".")


def _tensors_in(value: Any) -> list[Any]:
    """The tensors in a value, and the symbols for sizes, which are of no use after an export either; also in
    attributes of an object of the script."""
    leaves = [
        inner
        for leaf in pytree.tree_leaves(value)
        for inner in (pytree.tree_leaves(_entries(leaf)) if _is_object(leaf) else [leaf])
    ]
    return [x for x in leaves if isinstance(x, Tensor | NUMBERS)]


def check_outside(lost: Sequence[Left]) -> None:
    """Raises TraceError for the first of the places where tensors are left that no loss reads."""
    for holder, key in lost:
        name = holder.name_of(key)
        raise TraceError(
            f"the forward pass, or the loss, leaves a tensor in {name}, and the program of a parallel model "
            "does not",
            expected="tensors that the model returns, or that its loss reads from there",
            got=f"{name}, which holds a tensor after the call",
            where=str(place_of_function(holder.function)),
            hint=(
                f"to train on it: mixmesh.prepare(..., loss=function), where function(out, y) reads {name}",
                "to look at it: return it from forward too, and mixmesh.prepare(..., outputs=(1,))",
                "if only this call needs it, set it to None again at the end of forward",
                "if no step needs it: if not torch.compiler.is_exporting(): before that line",
            ),
        )
