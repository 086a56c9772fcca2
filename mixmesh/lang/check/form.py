"""The form of leaves, sinks and redistributions: the number and kind of their arguments and results.

All later checks read arguments by position and rely on this one.
"""

from __future__ import annotations

import re

from ..ir import Instruction, Ref
from .failure import Fail

OPERATOR = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){1,2}")
LEAF_OPTIONS = {"param": ("trainable",)}
SINK_FORMS = {
    "update": 'update("buffer", %value)',
    "output": 'output("name", %value), with rows=true for samples and grad=true for a gradient from outside',
}
OUTPUT_OPTIONS = "rows", "grad"


def check_form(i: Instruction, fail: Fail) -> None:
    """Raises VerificationError for an instruction without the form of its kind."""
    if i.is_leaf:
        _check_leaf(i, fail)
    elif i.is_sink:
        _check_sink(i, fail)
    elif i.is_redistribution:
        if len(i.args) != 1 or not isinstance(i.args[0], Ref) or len(i.results) != 1 or not i.results[0]:
            raise fail(f"{i.op} takes one value and gives one", f"%y = {i.op}(%x) : TYPE")
    elif not OPERATOR.fullmatch(i.op):
        raise fail(f"{i.op} is no name of an operator", "namespace.name or namespace.name.overload", i.op)
    if (i.is_redistribution or i.op == "update") and i.kwargs:
        raise fail(f"{i.op} takes no argument by name", "none", i.kwargs[0][0])


def _check_sink(i: Instruction, fail: Fail) -> None:
    if i.results or len(i.args) != 2 or not isinstance(i.args[0], str) or not isinstance(i.args[1], Ref):
        raise fail(f"this is no {i.op}", SINK_FORMS[i.op])
    if i.op == "output" and any(
        name not in OUTPUT_OPTIONS or not isinstance(value, bool) for name, value in i.kwargs
    ):
        raise fail("an output says of itself only whether it has rows and a gradient", SINK_FORMS[i.op])


def _check_leaf(i: Instruction, fail: Fail) -> None:
    kind = tuple if i.op == "const" else str
    if len(i.results) != 1 or not i.results[0] or len(i.args) != 1 or not isinstance(i.args[0], kind):
        form = "const([...]) : TYPE" if i.op == "const" else f'%x = {i.op}("name") : TYPE'
        raise fail(f"this is no {i.op}", form)
    for name, value in i.kwargs:
        if name not in LEAF_OPTIONS.get(i.op, ()) or not isinstance(value, bool):
            expected = "trainable=true or trainable=false" if i.op == "param" else "nothing by name"
            raise fail(f"{i.op} does not take {name} so", expected)
    if i.op == "const":
        _check_numbers(i, fail)


def _check_numbers(i: Instruction, fail: Fail) -> None:
    dtype = i.types[0].value.dtype
    for number in i.args[0]:
        if not isinstance(number, int | float):
            raise fail("a constant is made of numbers", "numbers, true and false")
        if isinstance(number, int) and not _holds(dtype, number):
            raise fail(f"{dtype} cannot hold {number}", "a number in its range", str(number))
        if isinstance(number, float) and not i.types[0].value.is_floating:
            raise fail(f"{dtype} holds whole numbers", "a whole number", str(number))


def _holds(dtype: str, number: int) -> bool:
    if dtype == "u8":
        return 0 <= number < 2**8
    if dtype[0] == "i":
        bits = int(dtype[1:])
        return -(2 ** (bits - 1)) <= number < 2 ** (bits - 1)
    return True
