"""Weight gradients that are made of gathered factors (``sfb``). No torch."""

from __future__ import annotations

from ..ir import Instruction, Program, Replicate, Shard


def check_factors(program: Program, i: Instruction, fail) -> None:
    """Raises what ``fail`` makes for an instruction with ``sfb`` whose weight's gradient is no product of two
    factors that ranks hold by samples, or whose parameters other instructions use without it."""
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
