"""One-shot all-reduces: ranks send each other their addends of a small value, with one message each."""

from __future__ import annotations

from ..cost.placed import Sheet
from ..lang.ir import Program


def without_needless_directness(program: Program, sheet: Sheet) -> Program:
    """The program without its limit for one-shot all-reduces if none of its sums is below the limit.
    ``sheet`` is the program's cost table."""
    if not program.direct_bytes or any(e and e.direct for e in sheet.exchanges.values()):
        return program
    return program.changed(direct_bytes=0)
