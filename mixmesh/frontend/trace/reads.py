"""Values that a forward pass reads and that become constants of a program: numbers and strings of modules,
and tensors that are neither parameters nor buffers of the model.

At every call the first rank compares them with their current values. Only values that were read count: a
module is free to count and note things that its forward pass does not use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from .attributes import TABLES
from .called import (
    all_called,
    bound_values,
    functions_of,
    is_own_class,
    is_own_function,
    names_in,
    plain_functions,
)
from .carried import Empty, Key, is_read
from .containers import (
    DEPTH,
    EVERY_KEY,
    Keys,
    ObjectWatch,
    find_in_object,
    is_container,
    is_plain_object,
    is_shared,
    keys_of_argument,
    keys_read,
    keys_read_by_class,
    numbers_in,
)
from .copies import original_of
from .generators import NoDraws
from .left_outside import LeftOutside, check_outside
from .values import FUNCTIONS, GONE, Find, is_replaceable, is_same, is_simple, shown

_OF_EVERY_MODULE = frozenset(
    {"training", "call_super_init", "dump_patches", "_version", "_compiled_call_impl"}
)
_OF_EXPORT = ("_tensor_constant", "_param_constant")  # the names that export gives to constants


@dataclass(frozen=True)
class Number:
    """A number or a string with the value that was read. ``find`` returns the current value in its place."""

    path: str
    find: Find
    value: Any

    def mark(self) -> str:
        """Describes how the value has changed; empty if it has not."""
        now = self.find()
        return "" if is_same(now, self.value) or now is GONE else f"{shown(now)}, was {shown(self.value)}"

    def renewed(self) -> Number:
        now = self.find()
        return self if now is GONE else replace(self, value=now)

    def was_empty(self) -> bool:
        """Whether nothing was there that a pass could count on: a pass that sets it may set it once."""
        return self.value is None or self.value is GONE or self.value is False


@dataclass(frozen=True)
class Constant:
    """A tensor of which a program holds a copy. ``find`` returns the tensor now in its place."""

    path: str
    find: Find
    tensor: Tensor
    version: int

    def mark(self) -> str:
        """Describes how the tensor has changed; empty if it has not."""
        now = self.find()
        if not _is_real(self.tensor):
            return "the weight of a model that is parallel by now"
        if now is GONE or now is self.tensor:
            return "" if self.tensor._version == self.version else f"new values, {self.tensor._version}"
        return f"another tensor, {id(now)}"

    def renewed(self) -> Constant:
        now = self.find()
        tensor = now if isinstance(now, Tensor) else self.tensor
        return replace(self, tensor=tensor, version=tensor._version)


@dataclass
class Reads:
    """The values that forward passes of a model have read, each as it was when it was first read. A separate
    object, because export undoes assignments to modules."""

    of: dict[Key, Number | Constant] = field(default_factory=dict)
    # entries of dicts, lists and objects that the last pass read and changed, as they were before
    changed_within: tuple[Number, ...] = ()
    places: dict[int, tuple[str, Find]] = field(default_factory=dict)  # by the id of a tensor
    losses: list[Any] = field(default_factory=list)  # functions that are not the model's own
    # by input, the line that asks whether it, or a value that is made of it, has a gradient
    asks_gradient: dict[str, str] = field(default_factory=dict)

    def changed(self, *kinds: type[Number] | type[Constant]) -> tuple[tuple[str, str], ...]:
        """The path of each value of these kinds that has changed, with a description of the change."""
        marks = [(x.path, x.mark()) for x in self.of.values() if isinstance(x, kinds)]
        return tuple((path, mark) for path, mark in marks if mark)

    def renew(self) -> None:
        """Replaces the old values by the current ones."""
        self.of = {key: value.renewed() for key, value in self.of.items()}

    def keep(self, key: Key, value: Number | Constant) -> None:
        if not value.mark() and (key not in self.of or self.of[key].find() is GONE):
            self.of[key] = value

    def keep_constants(self, model: nn.Module, program: ExportedProgram) -> None:
        """Notes the tensors of an exported program that no module holds, and forgets those that are tensors
        of the model by another name."""
        of_model = {id(x) for x in (*model.parameters(), *model.buffers())}
        for key, value in list(self.of.items()):
            if isinstance(value, Constant) and id(value.tensor) in of_model:
                del self.of[key]
        noted = of_model | {id(x.tensor) for x in self.of.values() if isinstance(x, Constant)}
        for name in program.graph_signature.inputs_to_lifted_tensor_constants.values():
            tensor = program.constants[name]
            if _is_real(tensor) and id(tensor) not in noted:
                path, find = f"a tensor of shape {list(tensor.shape)}", _find_itself(tensor)
                path, find = self.places.get(id(tensor), (path, find))
                self.keep((id(tensor), ""), Constant(path, find, tensor, tensor._version))


_READ: weakref.WeakKeyDictionary[nn.Module, Reads] = weakref.WeakKeyDictionary()
_passes: list[_Pass] = []  # running forward passes, the innermost last


def reads_of(model: nn.Module) -> Reads:
    """The values that forward passes of a model read while they were traced in this process."""
    return _READ.setdefault(model, Reads())


class _Pass:
    """A running forward pass of ``model``, and the values that it has read so far."""

    def __init__(self, model: nn.Module, losses: list[Any]) -> None:
        self._modules = {
            id(vars(each)): (path, original_of(module))
            for path, module in model.named_modules()
            for each in (module, original_of(module))
        }
        self._held: list[Any] = []  # keeps objects alive, so that no other object gets the id of a noted one
        self.noted: dict[Key, Number | Constant] = {}
        self.objects = ObjectWatch(self._note_inner)
        self._containers: set[Key] = set()
        self.places: dict[int, tuple[str, Find]] = {}  # by the id of a tensor that may be read
        self.empty = Empty()
        self.left = LeftOutside(model, losses)
        self._names: frozenset[str] = frozenset()  # names of the attributes that functions read
        self._bound: dict[str, Any] = {}  # arguments that come with functions, by the path of each
        self._outside: set[Key] = set()  # numbers that functions read, and no module holds
        # entries of dicts and lists that the code only writes, or that the pass has made itself
        self._not_state: set[Key] = set()

    def sets(self, module: nn.Module, name: str) -> None:
        """Notes that an attribute was set."""
        self.empty.sets((id(object.__getattribute__(module, "__dict__")), name))

    def changed(self) -> tuple[Number, ...]:
        """Values that the pass has read and changed, as they were before: numbers that functions read from
        outside, and entries of dicts, lists and objects (key 0). Those of modules are noted as attributes."""
        return tuple(
            x
            for key, x in self.noted.items()
            if (key in self._outside or (key[0] == 0 and key not in self._not_state))
            and isinstance(x, Number)
            and x.mark()
        )

    def _place(self, module: nn.Module, attributes: Mapping[str, Any]) -> tuple[str, nn.Module | None]:
        """The path of a module, and the script's own module; None for a module outside of the model."""
        if id(attributes) in self._modules:
            return self._modules[id(attributes)]
        original = original_of(module)
        return self._modules.get(id(vars(original)), (type(module).__name__, None))

    def attribute(self, module: nn.Module, name: str, value: Any, *, is_own: bool = True) -> None:
        """Notes an attribute of a module; ``value`` is GONE if there is none. During export, modules are
        replaced by stand-ins with the same ``__dict__``. ``is_own`` is False for a tensor in the module's
        tables of parameters and buffers."""
        attributes = object.__getattribute__(module, "__dict__")
        key = id(attributes), name
        if key in self.noted or name in _OF_EVERY_MODULE or name.startswith(_OF_EXPORT):
            return
        path, true_module = self._place(module, attributes)
        if true_module is not None and isinstance(value, Tensor) and not is_own:
            return  # an input of the program
        if is_metric(true_module if true_module is not None else module):
            return  # a metric only counts its inputs, and no program contains it
        self._held.append(attributes)
        full = f"{path}.{name}".lstrip(".")
        if (value is GONE or is_simple(value)) and id(attributes) in self._modules:
            self.empty.reads(key, full, None if value is GONE else value, type(module), attributes)
        find = _find_attribute(weakref.ref(true_module if true_module is not None else module), name)
        self._note(key, full, find, value)

    def function(self, module: nn.Module, name: str, value: Any) -> None:
        """Notes a function that an object itself has, and not its class, as ``self.act = F.relu``."""
        own = object.__getattribute__(module, "__dict__")
        if own.get(name, GONE) is value and name != "forward" and not name.startswith("_"):
            self.attribute(module, name, value)

    def container(self, module: nn.Module, name: str, value: Any) -> None:
        """Notes the numbers in an attribute of a module that is a dict, a list or an object."""
        attributes = object.__getattribute__(module, "__dict__")
        key = id(attributes), name
        if key in self._containers or name in TABLES or type(module).__module__.startswith("torch."):
            return
        self._containers.add(key)
        self._held.append(attributes)
        path, true_module = self._place(module, attributes)
        holder = true_module if true_module is not None else module
        if is_metric(holder):
            return
        kind: Any = type(module)
        find, keys = find_in_object(weakref.ref(holder), name), keys_read_by_class(kind, name)
        is_state = is_read(keys, value) and not self.empty.was_set(key)
        self._numbers_in(f"{path}.{name}".lstrip("."), find, value, keys, is_state=is_state)

    def _numbers_in(self, path: str, find: Find, value: Any, keys: Keys, *, is_state: bool) -> None:
        for each in numbers_in(path, find, value, keys):
            self.objects.note(*each)
            if not is_state:
                self._not_state.add((0, each[0]))

    def _note_inner(self, path: str, find: Find, value: Any) -> None:
        if _is_real(value):
            self.places[id(value)] = path, find
        elif is_shared(value):
            self._shared(path, find, value)
        elif value is GONE or not isinstance(value, Tensor):
            self.noted.setdefault((0, path), Number(path, find, value))

    def functions(self, first: Iterable[tuple[FunctionType, type | None]], sure: Iterable[Any] = ()) -> None:
        """Notes the outside numbers that functions, and those that they call, read, and the tensors that
        functions ``sure`` to run read. Other tensors are noted if the program turns out to contain them."""
        certain = {id(function) for function in sure}
        called = all_called(first)
        self._names = self._names.union(*(names_in(f.__code__).attributes for f in called))
        for function in called:
            is_sure = id(function) in certain
            self.bound(function)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                find = _find_in_cell(cell)
                self._around(function, (id(cell), name), find, find(), is_sure=is_sure)
            around, names = function.__globals__, names_in(function.__code__)
            for file in names.files(around):
                self._shared(file.__name__, _find_itself(file), file)
            for name in names.of_globals:
                if name in around:
                    key, find = (id(around), name), _find_in(around, name)
                    self._around(function, key, find, around[name], is_sure=is_sure)

    def bound(self, function: FunctionType | partial) -> None:
        """Notes the numbers in dicts, lists and objects that come with a function as its defaults or as the
        arguments of a ``partial``. Numbers themselves never change there."""
        for name, value in bound_values(function):
            if is_container(value):
                path = f"argument {name}"
                while self._bound.setdefault(path, value) is not value:
                    path += "'"  # another function's argument has this name
                reader = function.func if isinstance(function, partial) else function
                keys = keys_of_argument(name, reader) if isinstance(reader, FunctionType) else EVERY_KEY
                self._numbers_in(path, _find_itself(value), value, keys, is_state=False)
        if isinstance(function, partial) and isinstance(function.func, FunctionType | partial):
            self.bound(function.func)

    def holder_of(self, method: Any) -> None:
        """Watches the object whose method is called, or that is called itself, unless it is a module, and
        notes what a class method reads of its class."""
        holder = getattr(method, "__self__", method)
        find = _find_itself(holder)
        if isinstance(holder, type) and is_own_class(holder):
            for function in all_called(plain_functions(method)):
                for name in names_in(function.__code__).attributes:
                    self._around_in(f"{holder.__name__}.{name}", (id(holder), name), find, holder)
        elif is_plain_object(holder) or (is_own_class(type(holder)) and not isinstance(holder, nn.Module)):
            self.objects.show(type(holder).__name__, find, holder)

    def _around(self, function: FunctionType, key: Key, find: Find, value: Any, *, is_sure: bool) -> None:
        name = key[1]
        if _is_real(value) and not is_sure:
            self.places[id(value)] = name, find
            return
        self._note(key, name, find, value)
        self._outside.add(key)
        if is_container(value):
            keys = keys_read(name, function)
            self._numbers_in(name, find, value, keys, is_state=is_read(keys, value))
        elif isinstance(value, partial):
            self.bound(value)
        elif is_own_function(value):
            for inner in keys_read(name, function).names:
                self._around_in(f"{name}.{inner}", (id(value), str(inner)), find, value)

    def classes(self, modules: Iterable[nn.Module]) -> None:
        """Notes what functions may read of the classes of modules: ``type(self).alpha``."""
        for kind in {id(kind): kind for kind in map(type, modules)}.values():
            if is_own_class(kind):
                self._shared(kind.__name__, _find_itself(kind), kind)

    def _shared(self, path: str, find: Find, holder: Any, depth: int = DEPTH) -> None:
        """Notes what functions may read of a class or a file of the script, also of those in it."""
        own_file = getattr(holder, "__module__", holder.__name__)
        for name in sorted(self._names):
            value = getattr(holder, name, GONE)
            is_own = getattr(value, "__module__", None) == own_file
            if isinstance(value, FunctionType) and (is_own or value is getattr(nn.Module, name, None)):
                continue  # a method, or a function of the file
            if not is_shared(value):
                self._around_in(f"{path}.{name}", (id(holder), name), find, holder)
            elif depth:
                self._shared(f"{path}.{name}", find_in_object(find, name), value, depth - 1)

    def _around_in(self, path: str, key: Key, find: Find, holder: Any) -> None:
        """Notes an attribute of a module, of a class or of a function of the script."""
        find_inner, value = find_in_object(find, key[1]), getattr(holder, key[1], GONE)
        if _is_real(value):
            self.places[id(value)] = path, find_inner
            return
        self._note(key, path, find_inner, value)
        if is_container(value):
            self._numbers_in(path, find_inner, value, EVERY_KEY, is_state=False)

    def _note(self, key: Key, path: str, find: Find, value: Any) -> None:
        if is_simple(value) or is_replaceable(value):
            self.noted[key] = Number(path, find, value)
        elif _is_real(value):
            self.noted[key] = Constant(path, find, value, value._version)


def loss_outside(function: Any) -> AbstractContextManager[Any]:
    """A context for calling a loss that is not the model's own. If a forward pass is being traced, the values
    that the function reads from outside are noted, and random numbers are refused."""
    if not _passes:
        return nullcontext()
    _passes[-1].left.begins_loss(function)
    own = list(plain_functions(function))
    _passes[-1].functions(own, [each for each, _ in own])
    if isinstance(function, partial):
        _passes[-1].bound(function)
    _passes[-1].holder_of(function)
    return NoDraws()


def hook_outside(hook: Any) -> Callable[[Iterable[Any]], bool]:
    """Watches, if a forward pass is being traced, what a forward hook leaves. The returned function tells
    whether values are all tensors that were left; these are refused later unless the loss reads them."""
    return _passes[-1].left.begins_hook(hook) if _passes else lambda values: False


def part_outside(path: str, find: Find, holder: Any, functions: Iterable[Any]) -> None:
    """Notes, if a forward pass is being traced, the values that ``functions`` read from outside, and watches
    the ``holder`` of the methods among them, whose values are then those of what ``find`` gives. Unlike in
    ``loss_outside``, the functions may call the model, and draw random numbers there."""
    if _passes:
        functions = list(functions)
        for function in functions:
            _passes[-1].left.has_part(function)
        _passes[-1].functions(each for function in functions for each in plain_functions(function))
        _passes[-1].objects.show(path, find, holder)


@contextmanager
def reading(model: nn.Module, reads: Reads) -> Iterator[None]:
    """A context for a forward pass of ``model``. Notes in ``reads`` the values that it reads, except those
    that it changes itself."""
    seen, modules = _Pass(model, reads.losses), [original_of(module) for module in model.modules()]
    names = ("__getattribute__", "__getattr__", "__setattr__")
    before = {name: nn.Module.__dict__.get(name) for name in names}
    set_value = nn.Module.__setattr__
    get, get_missing = before["__getattribute__"] or object.__getattribute__, nn.Module.__getattr__

    def attribute(module: nn.Module, name: str) -> Any:
        value = get(module, name)
        if is_simple(value) or isinstance(value, Tensor):
            seen.attribute(module, name, value)
        elif isinstance(value, FUNCTIONS):
            seen.function(module, name, value)
        elif is_container(value):
            seen.container(module, name, value)
        return value

    def missing_attribute(module: nn.Module, name: str) -> Any:
        try:
            value = get_missing(module, name)
        except AttributeError:
            seen.attribute(module, name, GONE)
            raise
        if isinstance(value, Tensor):
            seen.attribute(module, name, value, is_own=False)
        return value

    def setting(module: nn.Module, name: str, value: Any) -> None:
        seen.sets(module, name)
        set_value(module, name, value)

    _set_on_modules({"__getattribute__": attribute, "__getattr__": missing_attribute, "__setattr__": setting})
    _passes.append(seen)
    try:
        with seen.objects.watching():
            seen.functions(each for module in modules for each in functions_of(module))
            for held in (x for module in modules for x in vars(module).values() if isinstance(x, partial)):
                seen.bound(held)
            seen.classes(modules)
            yield
    finally:
        _passes.pop()
        _set_on_modules(before)
        lost = seen.left.put_back()
    seen.empty.check(model)
    check_outside(lost)
    reads.changed_within = seen.changed()
    reads.places = seen.places
    for key, value in seen.noted.items():
        reads.keep(key, value)


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a metric of torchmetrics, whose state no program holds."""
    return any(
        c.__name__ == "Metric" and c.__module__.startswith("torchmetrics.") for c in type(module).__mro__
    )


def _set_on_modules(methods: Mapping[str, Any]) -> None:
    for name, method in methods.items():
        if method is None:
            delattr(nn.Module, name)
        else:
            setattr(nn.Module, name, method)


def _find_attribute(holder: weakref.ref, name: str) -> Find:
    def find() -> Any:
        module = holder()
        if module is None:
            return GONE
        for table in (vars(module), module._parameters, module._buffers):
            if name in table:
                return table[name]
        of_class = getattr(type(module), name, GONE)
        return of_class if is_simple(of_class) else GONE

    return find


def _find_in_cell(cell: Any) -> Find:
    def find() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # the cell is empty
            return GONE

    return find


def _find_itself(value: Any) -> Find:
    return lambda: value


def _find_in(names: Mapping[str, Any], name: str) -> Find:
    return lambda: names.get(name, GONE)


def _is_real(value: Any) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter)
