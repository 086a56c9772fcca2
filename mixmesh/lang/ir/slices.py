"""Parameters and constants with a row for each sample of the batch, which are cut like samples.

A micro-batch takes the rows of its own samples. A rank therefore has to hold all rows: if a pipeline cuts
every micro-batch between the ranks of a stage, a rank's samples are not consecutive in the batch.
"""

from __future__ import annotations

from dataclasses import replace

from .graph import Ref, with_names
from .instruction import Instruction, redistribution
from .placement import REPLICATE
from .program import Program
from .samples import cut_between_samples, is_cut_without_samples


def with_whole_rows(program: Program) -> Program:
    """The program in which ranks hold such parameters, buffers and values moved once per step whole, and
    slice the rows of their samples. Returns the same object if there are none."""
    values = cut_between_samples(program)
    slices: dict[str, str] = {}  # by leaf; leaves keep their names
    instructions: list[Instruction] = []
    for i in program.instructions:
        if not is_cut_without_samples(program, i, values):
            instructions.append(with_names(i, slices) if slices else i)
            continue
        part = whole = i.result
        if i.is_leaf:
            part = slices[whole] = _fresh(program, f"{whole}.s{i.type.shard.dim}")
        else:
            whole = _fresh(program, f"{part}.whole")
        t = replace(i.type, placement=REPLICATE)
        op = _op_of_whole(program, i)
        instructions.append(replace(with_names(i, slices), results=(whole,), types=(t,), op=op))
        instructions.append(Instruction((part,), i.types, "local_slice", (Ref(whole),)))
    if len(instructions) == len(program.instructions):
        return program
    return replace(program, instructions=tuple(instructions))


def _op_of_whole(program: Program, i: Instruction) -> str:
    if i.is_leaf:
        return i.op
    source = program.types[i.inputs[0]]
    same_ranks = program.participants(source) == program.participants(i.type)
    return redistribution(source.placement, REPLICATE) if same_ranks else "move"


def _fresh(program: Program, name: str) -> str:
    while name in program.types:
        name += "_"
    return name
