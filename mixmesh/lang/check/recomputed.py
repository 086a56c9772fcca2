"""Checks regions that the backward pass rematerialises."""

from __future__ import annotations

from ..ir import Instruction, region_of
from ..ir.samples import draws_once
from .failure import Fail


def check_region(i: Instruction, stale: frozenset[str], fail: Fail) -> None:
    """Raises VerificationError for an instruction of a region that cannot run again in the backward pass.
    ``stale`` are the values of ``updated_buffers``."""
    number = region_of(i)
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise fail("a region that is computed again has a number", "recompute=0", f"recompute={number!r}")
    if i.is_leaf or i.is_redistribution or i.is_sink:
        raise fail("only computations are computed again", "no recompute", f"recompute={number}")
    if i.attr("sfb", False):
        raise fail(
            "what gathers factors (sfb) in the backward pass is not computed again",
            "one of sfb and recompute",
        )
    if draws_once(i.op):
        raise fail(f"{i.op} would draw other numbers when it is computed again", "no recompute")
    for name in i.inputs:
        if name in stale:
            raise fail(f"%{name} is updated before the backward pass would read it again", "no recompute")
