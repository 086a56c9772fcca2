"""Which gradients are summed over ranks after they were computed, together with which, in which order.

One answer for the runtime, which sums them, and for the simulator, which says how long that takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir import Instruction, Program
from .placed import first_uses, synchronised

BUCKET_CAP_BYTES = 4 * 2**20
# what is on its way to the ranks that own it, or comes back from them, holds its buffer: the runtime has no
# more than this under way beside the newest
IN_FLIGHT_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class GradientSum:
    """A bucket: parameters of one dtype whose gradients are summed together between ``ranks``."""

    params: tuple[Instruction, ...]
    ranks: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return sum(p.type.value.size_bytes for p in self.params)


def gradient_sums(
    program: Program, cap_bytes: int = BUCKET_CAP_BYTES, first_use: Mapping[str, int] | None = None
) -> tuple[GradientSum, ...]:
    """The buckets of a program, in the order in which every rank starts them.

    A ``param`` with an attribute ``bucket`` goes where it says; the others are taken by first use, last
    first, up to ``cap_bytes`` each. A bucket holds one dtype and one set of ranks. Numbered ones come in
    the order of their numbers, then the others by when their last gradient is ready. ``first_use`` is
    that of the program, where it is known already.
    """
    used = first_uses(program) if first_use is None else first_use
    at = {p.result: used.get(p.result, -1) for p in program.params}  # a gradient without a use comes last
    summed = sorted((p for p in program.params if synchronised(program, p)), key=lambda p: -at[p.result])
    groups: dict[tuple, list[Instruction]] = {}
    filled: dict[tuple, tuple[int, int]] = {}  # per dtype and ranks: (open bucket, bytes in it)
    for p in summed:
        kind = (p.type.value.dtype, program.participants(p.type))
        number = p.attr("bucket")
        if number is None:
            size = p.type.value.size_bytes
            index, held = filled.get(kind, (0, 0))
            if held and held + size > cap_bytes:
                index, held = index + 1, 0
            filled[kind] = (index, held + size)
            number = -1 - index  # apart from the numbers that the program gives
        groups.setdefault((number, *kind), []).append(p)

    def ready(item: tuple[tuple, list[Instruction]]) -> tuple[int, int]:
        (number, *_), members = item
        return (0, number) if number >= 0 else (1, -min(at[p.result] for p in members))

    ordered = sorted(groups.items(), key=ready)
    return tuple(GradientSum(tuple(members), key[2]) for key, members in ordered)
