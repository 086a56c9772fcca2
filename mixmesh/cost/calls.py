"""The computations of a program by kind, so that repeated ones, such as those in the layers of a model, are
examined only once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..lang.ir import Instruction, Program, Shard, TensorType
from ..lang.rules import Call, call_of


# one object per kind in a program, so the object itself serves as a key
@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Computations that differ only in the names of values.

    ``inputs`` and ``outputs`` are types with placements. ``takes`` says for each input whether it takes a
    gradient, and ``grads`` is the number of distinct values that do: a value that is used twice counts once.
    """

    call: Call
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    takes: tuple[bool, ...]
    grads: int

    @property
    def work_type(self) -> TensorType:
        return _cut_first(self.outputs, self.inputs)


def work_type(program: Program, i: Instruction) -> TensorType:
    """The type whose share is the share of the work: a sharded result or input, or else the result."""
    return _cut_first(i.types, [program.types[name] for name in i.inputs])


def _cut_first(outputs: Sequence[TensorType], inputs: Sequence[TensorType]) -> TensorType:
    return next((t for t in (*outputs, *inputs) if isinstance(t.placement, Shard)), outputs[0])


def is_computation(i: Instruction) -> bool:
    return not (i.is_leaf or i.is_redistribution or i.is_sink)


def kinds_of(program: Program) -> Sequence[Kind | None]:
    """The kind of each instruction, with one object per kind; None for instructions that compute nothing."""
    types, grad = program.types, program.requires_grad
    out: list[Kind | None] = []
    kind_of: dict[tuple, Kind] = {}
    # instructions of repeated layers share their parts, which the program keeps alive
    by_identity: dict[tuple[int, ...], Kind] = {}
    plains: dict[tuple, tuple] = {}  # equal calls share one object
    for i in program.instructions:
        if not is_computation(i):
            out.append(None)
            continue
        names = i.inputs
        inputs = [types[name] for name in names]
        takes = tuple([name in grad for name in names])
        grads = sum(takes) if len(names) < 2 else len(grad.intersection(names))
        rest = (grads, *takes, *map(id, i.types), *map(id, inputs))
        kind = by_identity.get((id(i.plain), *rest))
        if kind is None:
            # in a program that was read from text, only types are shared
            parts = (id(plains.setdefault(i.plain, i.plain)), *rest)
            kind = by_identity.get(parts)
        if kind is None:
            key = (i.plain, i.types, tuple(inputs), takes, grads)
            if key not in kind_of:
                kind_of[key] = Kind(call_of(i, types), tuple(inputs), i.types, takes, grads)
            kind = by_identity[parts] = kind_of[key]
        out.append(kind)
    return out
