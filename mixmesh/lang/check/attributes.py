"""The attributes that an instruction may have: a table with the values that each attribute allows."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

from ..ir import Instruction
from ..ir.bounds import MAX_INSTRUCTIONS
from ..ir.printing import print_arg
from ..ir.samples import DRAWS
from .failure import Fail


class Attribute(NamedTuple):
    """The values that an attribute allows: a test of the value alone, the same in words, and a test of the
    value and its instruction."""

    is_value: Callable[[Any], bool]
    expected: str
    fits: Callable[[Instruction, Any], bool] = lambda i, value: True

    def accepts(self, i: Instruction, value: Any) -> bool:
        return self.is_value(value) and self.fits(i, value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INSTRUCTIONS


def _are_sizes(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) >= 3 and all(type(n) is int and n >= 0 for n in value)


def _is_part_of(i: Instruction, drawn: tuple[int, ...]) -> bool:
    """Whether a random operator may have this attribute: it gives a part, cut along one dim, of the drawn
    tensor."""
    _, dim, start, *whole = drawn
    shape = i.types[0].value.shape
    if i.op not in DRAWS or len(whole) != len(shape) or dim >= max(len(shape), 1):
        return False
    ends = (start + size <= n if d == dim else size == n for d, (size, n) in enumerate(zip(shape, whole)))
    return all(ends)


COUNT = Attribute(_is_count, f"a whole number from 0 to {MAX_INSTRUCTIONS}")
FLAG = Attribute(lambda value: isinstance(value, bool), "true or false")
TEXT = Attribute(lambda value: isinstance(value, str), 'a string, such as "padded"')
ELSEWHERE = Attribute(lambda value: True, "")  # checked together with other facts, in a separate module

ATTRIBUTES: dict[str, Attribute] = {
    "algorithm": TEXT,
    "bucket": COUNT,
    "drawn": Attribute(
        _are_sizes,
        "[number of the operator, dim, start, sizes of the whole ...] of an operator that draws",
        _is_part_of,
    ),
    "gradient_algorithm": TEXT,
    "owned": ELSEWHERE,
    "recompute": ELSEWHERE,
    "reshard": FLAG,
    "sfb": FLAG,
    "stage": ELSEWHERE,
    "wgrad": ELSEWHERE,
}


def check_attributes(i: Instruction, fail: Fail) -> None:
    """Raises VerificationError for an attribute that is unknown, repeated, or has a value of another kind."""
    seen: set[str] = set()
    for name, value in i.attrs:
        row = ATTRIBUTES.get(name)
        if row is None:
            near = difflib.get_close_matches(name, ATTRIBUTES, 1)
            raise fail(f"unknown attribute {name}", ", ".join(ATTRIBUTES), name, *near)
        if name in seen:
            raise fail(f"the attribute {name} is said twice", "each once", name)
        seen.add(name)
        if not row.accepts(i, value):
            raise fail(f"{name} cannot be this", row.expected, f"{name}={print_arg(value)}")
