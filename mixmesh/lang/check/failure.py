"""The error that names the line of a program."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import VerificationError
from ..ir import Instruction, Program, print_instruction
from ..plan_header import AGAIN

# makes an instruction's error from a message and optionally the expected value, the actual value, and hints
Fail = Callable[..., VerificationError]

# for someone who has edited a program
REWRITE = f"edit this line again, or plan again: {AGAIN}"


def invalid(
    program: Program, i: Instruction, where: str, message: str, expected: str = "", got: str = "", *hint: str
) -> VerificationError:
    """The error of instruction ``i``; without a ``hint`` it tells the reader to edit the line again."""
    at = place(program, i, where)
    return VerificationError(message, expected=expected, got=got, where=at, hint=hint or (REWRITE,))


def place(program: Program, i: Instruction, where: str) -> str:
    if i.line:
        at = f"{where}:{i.line}" if where else f"line {i.line}"
    else:
        index = next(n for n, other in enumerate(program.instructions) if other is i)
        at = f"{where}, instruction {index}" if where else f"instruction {index}"
    return f"{at}: {print_instruction(i)}"
