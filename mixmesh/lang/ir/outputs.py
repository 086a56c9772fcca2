"""Outputs, the values that the caller sees besides the loss: ``output("logits", %x, rows=true)``.

With ``rows``, each sample has one row of the value, or k rows, and a rank shows the rows of its own samples,
those that its loader reads. Such a value is held whole, or cut like the inputs if these are all cut along dim
0 by one ratio. Without ``rows`` every rank shows the whole value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .graph import Node, Ref
from .instruction import Instruction
from .placement import REPLICATE, Shard
from .program import Program
from .types import TensorType, ValueType, rank_sizes


@dataclass(frozen=True)
class Returned:
    """The return value of a model: the ``names`` of the tensors in it, the name of the ``loss`` among them,
    and whether it is a tuple, which unpacks to values. Without names it is the loss itself. ``loss`` is ""
    for a model without a loss; a single tensor other than the loss has the name ""."""

    names: tuple[str, ...] = ()
    loss: str = "loss"
    is_tuple: bool = False

    @property
    def has_loss(self) -> bool:
        """Whether the model computes its loss itself; otherwise the caller computes it from the returned
        values."""
        return bool(self.loss)


def has_rows(i: Node | Instruction) -> bool:
    """Whether each row of an output belongs to a sample."""
    return bool(dict(i.kwargs).get("rows", False))


def outputs_of(program: Program) -> dict[str, Instruction]:
    """The outputs of a program by name."""
    return {i.args[0]: i for i in program.instructions if i.op == "output"}


def batch_size_of(inputs: Iterable[ValueType]) -> int:
    """The size of dim 0 that most inputs of a batch have, in which shares are counted; among equally frequent
    sizes the first; 0 if there are none. A size of 1 counts last: masks and positions that all samples share
    may have it."""
    sizes = Counter(t.shape[0] for t in inputs if t.shape)
    return max(sizes, key=lambda size: (size > 1, sizes[size]), default=0)


def dealt_rows(program: Program) -> tuple[int, ...] | None:
    """The number of samples of each rank; None unless all inputs with samples are cut alike along dim 0."""
    inputs = [i.type for i in program.instructions if i.op == "input" and i.type.value.shape]
    batch_size = batch_size_of(t.value for t in inputs)
    cuts = set()
    for t in inputs:
        if t.value.shape[0] != batch_size:
            continue  # shared by all samples: a mask, a table
        if not isinstance(t.placement, Shard) or t.placement.dim:
            return None
        cuts.add(rank_sizes(t, program.ratio(t.ratio)))
    return cuts.pop() if len(cuts) == 1 else None


def shown_rows(program: Program, i: Instruction) -> tuple[int, ...] | None:
    """The number of rows of an output that each rank shows; None if all participants show the whole value."""
    samples = dealt_rows(program) if has_rows(i) else None
    if samples is None:
        return None
    each = program.types[i.inputs[0]].value.shape[0] // sum(samples)
    return tuple(n * each for n in samples)


def held_rows(program: Program, i: Instruction) -> tuple[int, ...] | None:
    """The number of rows of an output, along the cut dim, that each rank holds; None if it is held whole."""
    t = program.types[i.inputs[0]]
    return rank_sizes(t, program.ratio(t.ratio)) if isinstance(t.placement, Shard) else None


def with_rows_as_dealt(program: Program) -> Program:
    """The program in which every rank holds its part of the outputs.

    Rows that are not cut like the inputs are gathered, and values without rows are moved to all ranks,
    including those without samples. Returns the same object if nothing has to change.
    """
    instructions: list[Instruction] = []
    for i in program.instructions:
        for op, t in _redistribution_to_show(program, i) if i.op == "output" else ():
            name = f"{i.inputs[0]}.shown"
            while name in program.types:
                name += "2"
            instructions.append(Instruction((name,), (t,), op, (Ref(i.inputs[0]),)))
            i = replace(i, args=(i.args[0], Ref(name)))
        instructions.append(i)
    if len(instructions) == len(program.instructions):
        return program
    return replace(program, instructions=tuple(instructions))


def _redistribution_to_show(program: Program, i: Instruction) -> Iterator[tuple[str, TensorType]]:
    """Yields the redistribution, if any, after which ranks hold their parts of an output."""
    t = program.types[i.inputs[0]]
    if held_rows(program, i) not in (None, shown_rows(program, i)):
        yield "all_gather", replace(t, placement=REPLICATE)
    elif not has_rows(i) and len(program.participants(t)) < program.world_size:
        yield "move", TensorType(t.value, REPLICATE)
