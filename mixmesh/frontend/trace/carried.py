"""Finds state that a forward pass leaves for the next one where a program cannot update it: tensors in
attributes that are empty or a number at first, and entries of dicts and lists.

Such a program would compute every step like the first one. An attribute that is read while it holds no
tensor, and then holds what was computed from the batch or from what is trained, is refused. It cannot be
observed whether an entry of a dict or a list is read before it is written, so one that the code reads and the
pass changes gets a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree

from ...errors import TraceError
from .containers import DEPTH, Keys
from .locate import place_of_function

# methods of dicts and lists that read nothing
WRITES = frozenset({"append", "extend", "insert", "clear", "update"})
Entries = tuple[list | dict, list | dict]  # a list or a dict, and a copy of it
Key = tuple[int, str]  # id of the holder of a value, and the value's name there


class Empty:
    """The attributes of modules that a running forward pass reads while they are None, a number or not there,
    unless it sets them before."""

    def __init__(self) -> None:
        self._set: set[Key] = set()
        # by key: the path and what was found there, the module's class and its attributes
        self._read: dict[Key, tuple[str, Any, type[nn.Module], Mapping[str, Any]]] = {}

    def was_set(self, key: Key) -> bool:
        """Whether the pass has set an attribute itself, so that nothing was left there by the pass before."""
        return key in self._set

    def sets(self, key: Key) -> None:
        if key not in self._read:
            self._set.add(key)

    def reads(
        self, key: Key, path: str, found: Any, kind: type[nn.Module], attributes: Mapping[str, Any]
    ) -> None:
        if key not in self._set:
            self._read.setdefault(key, (path, found, kind, attributes))

    def check(self, model: nn.Module) -> None:
        """Raises TraceError for an attribute that holds what the pass has computed from the batch, or from
        what is trained; masks and tables that are made once do not count."""
        for (_, name), (path, found, kind, attributes) in self._read.items():
            if is_computed(attributes.get(name), model):
                was = "empty" if found is None else f"to be {found!r}"
                raise TraceError(
                    f"the forward pass finds {path} {was} and leaves a tensor there for the next step, so "
                    "every step would compute like the first one",
                    expected="a buffer that is updated in place",
                    got=f"self.{name} = ... in forward",
                    where=str(place_of_function(kind.forward)),
                    hint=(
                        f'self.register_buffer("{name}", tensor) in __init__, self.{name}.copy_(value) in '
                        "forward",
                        f"self.{name} = {found!r} at the beginning of forward, if no step needs the one "
                        "before it",
                    ),
                )


def is_computed(value: Any, model: nn.Module) -> bool:
    """Whether a value holds a tensor that the pass being exported computes from its inputs or from trained
    parameters, and not from constants and buffers alone, like a mask that is made once."""
    mode = get_proxy_mode()
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    if mode is None or not tensors:
        return bool(tensors)

    def nodes_of(these: Iterable[Tensor]) -> list[Any]:
        slots = [get_proxy_slot(tensor, mode.tracer, None) for tensor in these]
        return [slot.proxy.node for slot in slots if slot is not None]

    frozen = [p for p in model.parameters() if not p.requires_grad]
    constant = set(nodes_of((*model.buffers(), *frozen)))
    waiting = nodes_of(tensors)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder" and node not in constant:
            return True
        waiting += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    return False


def is_read(keys: Keys, value: Any) -> bool:
    """Whether code reads a dict or a list that the pass before may have changed: not if it only writes to
    it, or clears it."""
    if "clear" in keys.names:
        return False
    return keys.has_all or isinstance(value, dict) or bool(keys.names - WRITES)


def warnings_of_changed(paths: Sequence[str]) -> list[str]:
    """Returns a warning for each entry of a dict or a list that a forward pass reads and changes."""
    return [
        f"the forward pass changes {path}, which it reads: every step computes with what was there while the "
        "model was traced; keep it in a buffer if the loss depends on it"
        for path in paths
    ]


def holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def entries_of(value: Any, depth: int = DEPTH) -> Iterator[Entries]:
    """Yields a list or a dict with a copy of it, and then those inside."""
    if depth and type(value) in (list, dict):
        yield value, value.copy()
        for inner in value.values() if isinstance(value, dict) else value:
            yield from entries_of(inner, depth - 1)


def is_changed(held: list | dict, copied: list | dict) -> bool:
    """Whether a list or a dict has other entries than its copy. Tensors are not compared by value."""
    now, old = (x if isinstance(x, list) else [*x, *x.values()] for x in (held, copied))
    return len(now) != len(old) or not all(map(is_, now, old))


def restore(table: dict[Any, Any], names: Iterable[Any], old: Mapping[Any, Any]) -> None:
    """Gives these names of a table their ``old`` values, and removes those that are new."""
    for name in names:
        if name in old:
            table[name] = old[name]
        else:
            del table[name]


def refill(held: list | dict, copied: list | dict) -> None:
    """Puts the entries of a list or a dict back."""
    if isinstance(held, list):
        held[:] = copied
    else:
        held.clear()
        held.update(copied)
