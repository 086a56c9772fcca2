"""Values that autograd needs again for the backward of an instruction."""

from __future__ import annotations

from ..cost import VIEWS
from ..lang.ir import Instruction, Program
from ..lang.rules import RULES

KEEPS_NO_PARAMETER = VIEWS | {"aten.add.Tensor", "aten.sub.Tensor", "aten._to_copy", "aten.embedding"}


def keeps(program: Program, user: Instruction, name: str) -> bool:
    """Whether autograd needs an input of an instruction again, for the gradients of the others."""
    if user.op in KEEPS_NO_PARAMETER:
        return False
    rule = RULES.get(user.op)
    if rule is None or not rule.flops:
        return True
    factors = user.inputs[:2]  # a third one is a bias
    return name in factors and any(f != name and f in program.requires_grad for f in factors)
