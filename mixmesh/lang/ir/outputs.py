"""Values that the caller is shown beside the loss: ``output("logits", %x, rows=true)``.

The rows of such a value are samples, or k of them each sample; without ``rows`` every rank shows all of it.
A rank shows the rows of its own samples, the ones that a loader gives it: where the inputs are cut along
dim 0 by one ratio, the value is cut alike or held whole, and where they are not it is held whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .graph import Node, Ref
from .instruction import Instruction
from .placement import REPLICATE, Shard, shard_sizes
from .program import Program
from .types import TensorType, ValueType


@dataclass(frozen=True)
class Returned:
    """A model's return value in place of its loss: the ``names`` of the tensors in it, the one called
    ``loss`` among them, and whether it is a tuple, which unpacks to values. Without names it is the loss
    itself. Where ``loss`` is "" there is none among them, and a lone tensor has the name ""."""

    names: tuple[str, ...] = ()
    loss: str = "loss"
    is_tuple: bool = False

    @property
    def has_loss(self) -> bool:
        """Whether the model computes its loss itself. Else the caller does, from all that it returns."""
        return bool(self.loss)


def has_rows(i: Node | Instruction) -> bool:
    """Whether the rows of an output are samples."""
    return bool(dict(i.kwargs).get("rows", False))


def outputs_of(program: Program) -> dict[str, Instruction]:
    """The outputs of a program by name."""
    return {i.args[0]: i for i in program.instructions if i.op == "output"}


def batch_size_of(inputs: Iterable[ValueType]) -> int:
    """The size of dim 0 that most inputs of a batch have, of equally frequent ones the first; 0 without."""
    sizes = Counter(t.shape[0] for t in inputs if t.shape)
    return max(sizes, key=sizes.__getitem__, default=0)


def dealt_rows(program: Program) -> tuple[int, ...] | None:
    """How many samples each rank is given; None if inputs that hold samples are not cut alike along dim 0."""
    inputs = [i.type for i in program.instructions if i.op == "input" and i.type.value.shape]
    batch_size = batch_size_of(t.value for t in inputs)
    found = set()
    for t in inputs:
        if t.value.shape[0] != batch_size:
            continue  # one for all samples: a mask, a table
        if not isinstance(t.placement, Shard) or t.placement.dim:
            return None
        found.add(shard_sizes(batch_size, program.ratio(t.ratio), t.placement.unit))
    return found.pop() if len(found) == 1 else None


def shown_rows(program: Program, i: Instruction) -> tuple[int, ...] | None:
    """How many rows of an output each rank shows; None if each rank that takes part shows all of it."""
    samples = dealt_rows(program) if has_rows(i) else None
    if samples is None:
        return None
    each = program.types[i.inputs[0]].value.shape[0] // sum(samples)
    return tuple(n * each for n in samples)


def held_rows(program: Program, i: Instruction) -> tuple[int, ...] | None:
    """How many rows of an output each rank holds; None if it is held whole."""
    t = program.types[i.inputs[0]]
    if not isinstance(t.placement, Shard):
        return None
    return shard_sizes(t.value.shape[0], program.ratio(t.ratio), t.placement.unit)


def with_rows_as_dealt(program: Program) -> Program:
    """The program in which ranks hold what they show of every output: rows as the inputs are cut, or all.

    Rows that are cut otherwise are gathered, and what has no rows is held by all ranks, those without
    samples too. The same object if nothing is to be done."""
    marked: list[Instruction] = []
    for i in program.instructions:
        for op, t in _on_the_way(program, i) if i.op == "output" else ():
            name = f"{i.inputs[0]}.shown"
            while name in program.types:
                name += "2"
            marked.append(Instruction((name,), (t,), op, (Ref(i.inputs[0]),)))
            i = replace(i, args=(i.args[0], Ref(name)))
        marked.append(i)
    return (
        program if len(marked) == len(program.instructions) else replace(program, instructions=tuple(marked))
    )


def _on_the_way(program: Program, i: Instruction) -> Iterator[tuple[str, TensorType]]:
    """The redistribution, if there has to be one, from an output's value to what ranks show."""
    t = program.types[i.inputs[0]]
    if held_rows(program, i) not in (None, shown_rows(program, i)):
        yield "all_gather", replace(t, placements=(REPLICATE,))
    elif not has_rows(i) and len(program.participants(t)) < program.world_size:
        yield "move", TensorType(t.value, (REPLICATE,))
