"""Packed sums: one all-reduce that replaces several small ones; planning packs them (``passes.order``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from .instruction import Instruction
from .program import Program


class PackedSum(NamedTuple):
    """The three instructions of a packed sum, which concatenate the addends, sum them, and split the
    result."""

    cat: Instruction
    sum: Instruction
    split: Instruction


def packed_sums(program: Program) -> Iterator[PackedSum]:
    """Yields the packed sums of a program, in order."""
    users: dict[str, list[Instruction]] = defaultdict(list)
    sums = [i for i in program.instructions if i.op == "all_reduce"]
    sums = [i for i in sums if program.producers[i.inputs[0]].op == "aten.cat"]
    for i in program.instructions if sums else ():
        for name in i.inputs:
            users[name].append(i)
    for i in sums:
        if len(users[i.inputs[0]]) == 1 == len(users[i.result]):
            cat, split = program.producers[i.inputs[0]], users[i.result][0]
            if _undoes(program, split, cat):
                yield PackedSum(cat, i, split)


def _undoes(program: Program, split: Instruction, cat: Instruction) -> bool:
    """Whether ``split`` returns the pieces that ``cat`` concatenated."""
    if split.op != "aten.split_with_sizes" or len(cat.inputs) < 2:
        return False
    return [program.types[name].value for name in cat.inputs] == [t.value for t in split.types]
