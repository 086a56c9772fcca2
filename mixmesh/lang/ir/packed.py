"""Sums that stand for several small ones, which planning packs together (``order.coalesced``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from .instruction import Instruction
from .program import Program


class PackedSum(NamedTuple):
    """Instructions that put the addends together, sum them, and take the sum apart again."""

    cat: Instruction
    sum: Instruction
    split: Instruction


def packed_sums(program: Program) -> Iterator[PackedSum]:
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
    """Whether the pieces of one are what the other put together."""
    if split.op != "aten.split_with_sizes" or len(cat.inputs) < 2:
        return False
    return [program.types[name].value for name in cat.inputs] == [t.value for t in split.types]
