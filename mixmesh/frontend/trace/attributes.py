"""Finds attributes that a model's forward pass replaces: state that a program cannot update.

Export takes their values at the time of tracing, so every step would begin with these. A buffer that is
updated in place becomes part of the program. A tensor that is replaced is refused if the forward pass reads
the old one, or if a checkpoint would save it; a replaced number gets a warning. Tensors that the pass leaves
in attributes for its caller (``self.aux_loss = ...``) are not there on a parallel model, which refuses to be
asked for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ...errors import TraceError
from .carried import Entries, entries_of, holds_tensors, is_changed, refill, restore
from .locate import Place, place_of_function

TABLES = frozenset({"__dict__", *vars(nn.Module())})  # attributes of every module
KEPT = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class Replaced:
    """An attribute that a forward pass replaced. ``place`` is the forward method of its module."""

    name: str
    is_number: bool
    is_saved: bool
    place: Place


Key = tuple[str, str]  # (path of a module, name of its attribute)


@dataclass(frozen=True)
class Table:
    """The attributes or the buffers of the module at ``path``: as they are ``now``, a copy from before a
    forward pass, and by name the lists and dicts ``inside`` with copies of these."""

    path: str
    now: dict[str, Any]
    old: dict[str, Any]
    inside: dict[str, list[Entries]]


class Attributes:
    """The tensors and numbers that modules have as attributes; ``replaced`` are those that the last forward
    pass replaced, and ``left`` the paths of attributes where it left tensors. They cannot be kept on a
    module, whose attributes export resets."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.replaced: tuple[Replaced, ...] = ()
        self.left: tuple[str, ...] = ()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context for a forward pass: notes which tensors it replaces and then puts the old ones back,
        because the new ones are of no use outside of the export."""
        modules = dict(self._model.named_modules())
        before = dict(_held(modules))
        held = [(path, t) for path, m in modules.items() for t in (m.__dict__, m._buffers)]
        tables = [Table(path, t, dict(t), _entries(t)) for path, t in held]
        try:
            yield
        finally:
            self.replaced = tuple(_replaced(modules, before))
            self.left = tuple(dict.fromkeys(name for table in tables for name in _left(table)))
            for table in tables:
                _put_back(table.now, table.old)
                for entries, copied in chain.from_iterable(table.inside.values()):
                    refill(entries, copied)


def _entries(table: Mapping[str, Any]) -> dict[str, list[Entries]]:
    return {name: list(entries_of(value)) for name, value in table.items() if name not in TABLES}


def _left(table: Table) -> Iterator[str]:
    """Yields the path of each attribute where a forward pass left tensors, also within a list or a dict."""
    for name, value in table.now.items():
        is_new = value is not table.old.get(name)
        if (is_new or any(starmap(is_changed, table.inside.get(name, ())))) and holds_tensors(value):
            yield f"{table.path}.{name}".lstrip(".")


def _held(modules: Mapping[str, nn.Module]) -> Iterator[tuple[Key, tuple[Any, ...]]]:
    """Yields each tensor with its memory, and each number."""
    for path, module in modules.items():
        for name, value in (*vars(module).items(), *module._buffers.items()):
            if isinstance(value, Tensor):
                yield (path, name), (value, value.untyped_storage()._cdata)
            elif type(value) in (int, float) and not name.startswith("_"):
                yield (path, name), (value,)


def _replaced(modules: Mapping[str, nn.Module], before: Mapping[Key, tuple[Any, ...]]) -> Iterator[Replaced]:
    """Yields the attributes that have changed; newly added attributes do not count."""
    for (path, name), value in _held(modules):
        was = before.get((path, name), value)
        if len(was) != len(value) or not all(map(_same, was, value)):
            module = modules[path]
            is_saved = name in module._buffers and name not in module._non_persistent_buffers_set
            full, place = f"{path}.{name}".lstrip("."), place_of_function(type(module).forward)
            yield Replaced(full, not isinstance(value[0], Tensor), is_saved, place)


def check_replaced(replaced: Sequence[Replaced], program: ExportedProgram, prefix: str) -> None:
    """Raises TraceError for a tensor that the forward pass replaces and reads, or that checkpoints save.
    ``prefix`` stands before the model's names in the exported program."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    read = {
        spec.target.removeprefix(prefix)
        for spec, node in zip(program.graph_signature.input_specs, placeholders)
        if spec.kind in KEPT and node.users and spec.target is not None
    }
    for each in replaced:
        if not each.is_number and (each.is_saved or each.name in read):
            short = each.name.rpartition(".")[2]
            raise TraceError(
                f"the forward pass replaces {each.name}, so every step would begin with the tensor that was "
                "there when the model was planned",
                expected="a buffer that is updated in place",
                got=f"self.{short} = ..., or self.{short}.data = ...",
                where=str(each.place),
                hint=(
                    f"self.{short}.copy_(value) in forward",
                    f'self.register_buffer("{short}", tensor) in __init__, if it is no buffer yet',
                ),
            )


def warnings_of(replaced: Sequence[Replaced]) -> list[str]:
    """Returns a warning for each number that the forward pass changes."""
    return [
        f"the forward pass changes the number {each.name}{_in(each.place)}: every step computes with what it "
        "was while the model was traced; keep it in a buffer if the loss depends on it"
        for each in replaced
        if each.is_number
    ]


def _in(place: Place) -> str:
    return f" ({place})" if place.location else ""


def _put_back(table: dict[str, Any], old: Mapping[str, Any]) -> None:
    """Gives names that hold other tensors now their ``old`` values; removes new names that hold any."""
    replaced = [n for n, value in table.items() if value is not old.get(n) and holds_tensors(value)]
    restore(table, replaced, old)


def _same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Tensor) and a == b)
