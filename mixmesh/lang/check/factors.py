"""Checks weight gradients that are computed from gathered factors (``sfb``)."""

from __future__ import annotations

from ..ir import Instruction, Program, Replicate, Shard
from .failure import Fail


def check_factors(program: Program, i: Instruction, fail: Fail) -> None:
    """Raises VerificationError for an ``sfb`` on an instruction whose weight gradient is no product of two
    factors cut by samples, or whose parameters another instruction uses without ``sfb``."""
    if not i.attr("sfb", False):
        return
    if i.op != "aten.linear":
        raise fail("only the gradient of a linear layer is made of factors", "aten.linear, or no sfb", i.op)
    x, *params = (program.types[name] for name in i.inputs)
    if not isinstance(x.placement, Shard) or x.placement.dim == len(x.value.shape) - 1:
        raise fail("the factors of a gradient (sfb) are cut by samples", "S(dim), not the last", str(x))
    for name, t in zip(i.inputs[1:], params):
        if program.producers[name].op != "param" or not isinstance(t.placement, Replicate):
            raise fail(
                "a gradient out of factors (sfb) is a parameter's", f"%{name} a param held as R", str(t)
            )
        if any(name in other.inputs and not other.attr("sfb", False) for other in program.instructions):
            raise fail(f"%{name} is used with sfb and without", "sfb on all that use a parameter, or on none")
