"""Copies of a parameter: several sets of ranks hold it, each with a placement of its own.

If several ``param`` instructions load one parameter, each loads a copy for other ranks, as R or in shards
under a ratio of its own, and the gradients of all copies are summed. For the sum, the common part of two
copies is cut into *cells*, boxes of the tensor that the same ranks hold. For example, if two machines cut 12
rows between two and three devices, as 0-6, 6-12 and 0-4, 4-8, 8-12, then there are four cells, 0-4, 4-6, 6-8
and 8-12, and two ranks sum each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

from .body import Body
from .instruction import Instruction
from .placement import Ratio, Shard, shard_offsets
from .program import Program
from .types import DTYPE_BYTES, ValueType, rank_sizes

Box = tuple[tuple[int, int], ...]  # per dim, the first element and the number of elements


@dataclass(frozen=True, slots=True)
class Cell:
    """Boxes of one tensor held by exactly these ``ranks``. If the boxes must be counted once, that of
    ``keeper`` counts, a rank that holds the first copy."""

    ranks: tuple[int, ...]
    keeper: int
    boxes: tuple[Box, ...]

    @property
    def num_elements(self) -> int:
        return sum(math.prod(size for _, size in box) for box in self.boxes)


def cells(program: Program, param: Instruction) -> tuple[Cell, ...]:
    """The cells of a parameter with copies; ``param`` is the first copy."""
    return _cells_under(program.body, program.world_size, program.ratios, param.args[0])


@lru_cache(maxsize=1024)
def _cells_under(
    body: Body, world_size: int, ratios: tuple[tuple[str, Ratio], ...], name: str
) -> tuple[Cell, ...]:
    program = Program(body.name, world_size, ratios, body.instructions, body.loss, body=body)
    held = []
    for copy in program.copies[name]:
        pieces = [(rank, piece(program, copy, rank)) for rank in program.participants(copy.type)]
        held.append(tuple((rank, box) for rank, box in pieces if all(size for _, size in box)))
    return _cells(program.copies[name][0].type.value, tuple(held))


def piece(program: Program, param: Instruction, rank: int) -> Box:
    """The box of a parameter that ``rank``, one of its participants, holds."""
    t = param.type
    box = [(0, size) for size in t.value.shape]
    if isinstance(t.placement, Shard):
        sizes = rank_sizes(t, program.ratio(t.ratio))
        box[t.placement.dim] = (shard_offsets(sizes)[rank], sizes[rank])
    return tuple(box)


@lru_cache(maxsize=4096)
def _cells(value: ValueType, held: tuple[tuple[tuple[int, Box], ...], ...]) -> tuple[Cell, ...]:
    boxes = [box for copy in held for _, box in copy]
    borders = [
        sorted({0, size, *(edge for box in boxes for edge in (box[dim][0], sum(box[dim])))})
        for dim, size in enumerate(value.shape)
    ]
    first = {rank for rank, _ in held[0]}
    boxes_of: dict[tuple[int, ...], list[Box]] = {}
    for spans in product(*(tuple(pairwise(edges)) for edges in borders)):
        cell = tuple((start, stop - start) for start, stop in spans)
        ranks = tuple(sorted(rank for copy in held for rank, box in copy if _within(cell, box)))
        boxes_of.setdefault(ranks, []).append(cell)
    return tuple(
        Cell(ranks, min(first.intersection(ranks), default=ranks[0]), tuple(these))
        for ranks, these in boxes_of.items()
        if len(ranks) > 1
    )


def _within(cell: Box, box: Box) -> bool:
    return all(a >= b and a + n <= b + m for (a, n), (b, m) in zip(cell, box))


def cell_bytes(value: ValueType, cell: Cell) -> int:
    return cell.num_elements * DTYPE_BYTES[value.dtype]
