"""Checks outputs besides the loss, which ranks show whole or by the rows of their own samples."""

from __future__ import annotations

from ..ir import Instruction, Partial, Program, Shard, dealt_rows, has_rows, held_rows, outputs_of, shown_rows
from .failure import Fail


def check_output(program: Program, i: Instruction, fail: Fail) -> None:
    """Raises VerificationError for an output that no rank can show from its own part."""
    name, source = i.args[0], i.inputs[0]
    t = program.types[source]
    if outputs_of(program)[name] is not i:
        raise fail(f"the output {name} is given twice", "every output once")
    if isinstance(t.placement, Partial):
        raise fail("an output is no addend", "R or S(0)", str(t), f"%x = all_reduce(%{source})")
    rows = sum(dealt_rows(program) or (1,))
    if has_rows(i) and (not t.value.shape or t.value.shape[0] % rows):
        raise fail("the rows of this output are no samples", f"a multiple of {rows} rows", str(t.value))
    if not isinstance(t.placement, Shard):
        return
    if t.placement.dim or held_rows(program, i) != shown_rows(program, i):
        expected = "R, or S(0) in the shares of the inputs, with rows=true"
        raise fail("an output is not cut as samples are", expected, str(t), f"%x = all_gather(%{source})")
