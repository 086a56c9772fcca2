"""Finds parameters that are gathered again in the backward pass (ZeRO-3)."""

from __future__ import annotations

from ..cost.outline import is_resharded
from ..lang.ir import Instruction, Program, release_points


def gathers_again(program: Program) -> dict[int, list[Instruction]]:
    """Repeated gathers, by the instruction before whose backward they start, in the program's order.

    That is the last instruction that uses the parameter, or the end of the last region that reads it.
    Autograd has to reach it: a gather is not repeated if it is no computation, or if no gradient passes it.
    """
    gathers = [i for i in program.instructions if i.op == "all_gather" and is_resharded(program, i)]
    out: dict[int, list[Instruction]] = {}
    points = release_points(program, [i.result for i in gathers]) if gathers else {}
    for i in gathers:
        if i.result in program.requires_grad and i.result in points:
            last = program.instructions[points[i.result]]
            plain = not (last.is_redistribution or last.is_leaf or last.is_sink)
            if plain and last.results[0] in program.requires_grad:
                out.setdefault(points[i.result], []).append(i)
    return out
