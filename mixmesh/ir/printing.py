"""Printing: the text of a program. ``text`` says what the grammar is and reads it back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .graph import Arg, DType, Ref

if TYPE_CHECKING:
    from .program import Instruction, Program


def print_program(program: Program, notes: Mapping[int, str] | None = None) -> str:
    """The text of a program. ``notes`` maps instruction indices to comments (costs, local sizes)."""
    lines = [f"program {program.name} world={program.world_size} {{"]
    for name, ratio in program.ratios:
        lines.append(f"  ratio {name} = [{', '.join(f'{share:g}' for share in ratio)}]")
    lines += [f"  dtype {name} = [{', '.join(row)}]" for name, row in program.dtypes]
    if program.levels is not None:
        sizes = ", ".join(map(str, program.levels.sizes))
        lines.append(f"  levels = [{sizes}] from {program.levels.least_bytes}")
    if program.direct_bytes:
        lines.append(f"  direct to {program.direct_bytes}")
    body = [(f"  {print_instruction(i)}", _note(i, n, notes)) for n, i in enumerate(program.instructions)]
    column = min(100, max((len(text) for text, note in body if note), default=0))
    for text, note in body:
        lines.append(f"{text:<{column}}  # {note}" if note else text)
    return "\n".join([*lines, f"  return %{program.loss}", "}"]) + "\n"


def print_instruction(i: Instruction) -> str:
    arguments = [print_arg(a) for a in i.args] + [f"{k}={print_arg(v)}" for k, v in i.kwargs]
    text = f"{i.op}({', '.join(arguments)})"
    if i.results:
        text = ", ".join(f"%{r}" if r is not None else "_" for r in i.results) + " = " + text
    if i.attrs:
        text += " {" + ", ".join(f"{k}={print_arg(v)}" for k, v in i.attrs) + "}"
    if i.types:
        text += " : " + ", ".join(map(str, i.types))
    return text


def print_arg(arg: Arg) -> str:
    match arg:
        case None:
            return "none"
        case bool():
            return "true" if arg else "false"
        case float():
            return repr(arg)
        case int() | Ref() | DType():
            return str(arg)
        case str():
            return json.dumps(arg)
        case tuple():
            return f"[{', '.join(map(print_arg, arg))}]"
    raise TypeError(f"{arg!r} cannot stand in program text")


def _note(i: Instruction, index: int, notes: Mapping[int, str] | None) -> str:
    parts = [notes.get(index, "") if notes else "", i.location]
    return "  ".join(p for p in parts if p)
