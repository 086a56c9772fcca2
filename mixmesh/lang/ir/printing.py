"""Prints instructions; ``text`` has the grammar and reads them back."""

from __future__ import annotations

import json

from .graph import Arg, DType, Ref
from .instruction import Instruction


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
