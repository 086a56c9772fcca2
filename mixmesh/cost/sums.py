"""The buckets of gradients that are summed over ranks after they were computed, and their order.

The runtime, which makes the sums, and the simulator, which times them, both use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..lang.ir import (
    NEVER,
    Buckets,
    Cell,
    Instruction,
    Parts,
    Program,
    cell_bytes,
    cells,
    last_points,
    leaders,
    owned_type,
    stage_of,
    support,
)
from .exchanges import Exchange
from .outline import summed_params

BUCKET_CAP_BYTES = 4 * 2**20
# limit on the buffers of gradients on their way to or from shard owners, without the newest one
IN_FLIGHT_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class GradientSum:
    """A bucket: parameters of one dtype whose gradients are summed together between ``ranks``. If they have
    owners, the sums go to these by the ratio ``owned``, in that ``stage`` of ZeRO; ``rooted`` if there is one
    owner. A parameter with copies has one of its ``cells`` in a bucket."""

    params: tuple[Instruction, ...]
    ranks: tuple[int, ...]
    size_bytes: int
    owned: str | None = None
    stage: int = 0
    rooted: bool = False
    cells: tuple[Cell | None, ...] = ()  # by parameter; empty if none of them has copies
    late: bool = False  # summed once all gradients that redistributions bring have arrived
    parts: Parts = ()  # the ranks by machine, if the sum is hierarchical

    @property
    def exchange(self) -> Exchange:
        name = "all_reduce" if self.owned is None else "reduce_scatter"
        return Exchange(
            name,
            self.size_bytes,
            self.ranks,
            rooted=self.rooted,
            levelled=bool(self.parts),
            joined=len(self.params) > 1 or any(self.cells),
        )

    @property
    def gather(self) -> Exchange:
        """The gather of this bucket's parameters from the owners that have stepped them, out of a buffer."""
        return Exchange(
            "all_gather",
            self.size_bytes,
            self.ranks,
            rooted=self.rooted,
            levelled=bool(self.parts),
            joined=True,
        )


def gradient_bytes(param: Instruction, cell: Cell | None) -> int:
    """Bytes of a parameter's gradient, or of its summed cell."""
    return param.type.value.size_bytes if cell is None else cell_bytes(param.type.value, cell)


class SumKind(NamedTuple):
    """The facts that must agree within a bucket. ``owned`` is the ratio of shard owners."""

    dtype: str
    ranks: tuple[int, ...]
    owned: str | None
    stage: int


class Summed(NamedTuple):
    """A parameter whose gradient is summed: its index among the program's parameters, its first use (or the
    point at which its gradient is complete, if that is later: ``last_points``), and the kind of its sum. A
    parameter with copies is represented by the first one, once for every ``cell``."""

    place: int
    first_use: float
    kind: SumKind
    cell: Cell | None = None
    late: bool = False


def order_of_sums(program: Program) -> tuple[Summed, ...]:
    """Parameters whose gradients are summed, by first use, last first; independent of their buckets.
    Gradients without a use come last."""
    used = last_points(program)
    places = {p.result: place for place, p in enumerate(program.params)}
    sums = []
    for p in summed_params(program):
        place, first, dtype = places[p.result], used.get(p.result, NEVER), p.type.value.dtype
        if p.args[0] in program.copies:
            late = p.args[0] in program.late
            kinds = [(c, SumKind(dtype, c.ranks, None, 0)) for c in cells(program, p)]
            sums += [Summed(place, first, kind, c, late) for c, kind in kinds]
        else:
            kind = SumKind(dtype, program.participants(p.type), *_owners(program, p))
            sums.append(Summed(place, first, kind))
    return tuple(sorted(sums, key=lambda s: -s.first_use))


def with_other_owners(program: Program, order: tuple[Summed, ...]) -> tuple[Summed, ...]:
    """``order_of_sums`` of a program, derived from ``order``, that of the same program with other owners."""
    sums, params, owned_types = [], program.params, program.owned  # runs thousands of times a second
    for s in order:
        if s.cell is None and (s.kind.owned is not None or params[s.place].result in owned_types):
            owned, stage = _owners(program, params[s.place])
            if (owned, stage) != (s.kind.owned, s.kind.stage):
                kind = SumKind(s.kind.dtype, s.kind.ranks, owned, stage)
                s = Summed(s.place, s.first_use, kind, None, s.late)
        sums.append(s)
    return tuple(sums)


def _owners(program: Program, param: Instruction) -> tuple[str | None, int]:
    owned = owned_type(program, param)
    return (None, 0) if owned is None else (owned.ratio, stage_of(param))


def gradient_sums(
    program: Program,
    cap_bytes: int = BUCKET_CAP_BYTES,
    order: tuple[Summed, ...] | None = None,
    buckets: Buckets | None = None,
) -> tuple[GradientSum, ...]:
    """The buckets of a program, in the order in which every rank starts them.

    A ``param`` with an attribute ``bucket`` goes into that one; the others are taken by first use, last
    first, up to ``cap_bytes`` each. A bucket holds one dtype, one set of ranks and one of owners. Numbered
    buckets come in the order of their numbers, then the others by when their last gradient is ready.
    ``order`` is that of the program's sums, if it is already known: it does not depend on buckets.
    ``buckets`` replace the program's own.
    """
    numbers = program.buckets if buckets is None else buckets
    groups: dict[tuple, list[Summed]] = {}
    filled: dict[tuple, tuple[int, int]] = {}  # per dtype and ranks: (open bucket, bytes in it)
    params = program.params
    for s in order_of_sums(program) if order is None else order:
        number = numbers[s.place]
        is_open = number is None  # and the bucket follows the order of first use
        if number is None:
            size = gradient_bytes(params[s.place], s.cell)
            index, held = filled.get(s.kind, (0, 0))
            if held and held + size > cap_bytes:
                index, held = index + 1, 0
            filled[s.kind] = (index, held + size)
            number = index
        groups.setdefault((is_open, number, s.kind, s.late), []).append(s)

    def ready(item: tuple[tuple, list[Summed]]) -> tuple[bool, bool, float]:
        (is_open, number, _, late), members = item  # by first use, last first
        return late, is_open, -members[-1].first_use if is_open else number

    owners = {kind.owned for _, _, kind, _ in groups if kind.owned is not None}
    rooted = {owned for owned in owners if len(support(program.ratio_of[owned])) == 1}

    def made(kind: SumKind, late: bool, members: list[Summed]) -> GradientSum:
        cells = tuple([s.cell for s in members]) if program.copies else ()
        gradients = tuple([params[s.place] for s in members])
        size_bytes = sum([gradient_bytes(params[s.place], s.cell) for s in members])
        parts = parts_of(program, size_bytes, kind.ranks, kind.owned)
        return GradientSum(
            gradients,
            kind.ranks,
            size_bytes,
            kind.owned,
            kind.stage,
            kind.owned in rooted,
            cells if any(cells) else (),
            late,
            parts,
        )

    ordered = sorted(groups.items(), key=ready)
    return tuple(made(kind, late, members) for (_, _, kind, late), members in ordered)


def parts_of(program: Program, size_bytes: int, ranks: tuple[int, ...], owned: str | None = None) -> Parts:
    """The ranks by machine if a sum of ``size_bytes`` is hierarchical, else empty. A sum to owners is
    hierarchical only if there are several owners, all of them leaders."""
    parts = () if program.levels is None else program.levels.parts(ranks, size_bytes)
    if not parts or owned is None:
        return parts
    owners = support(program.ratio_of[owned])
    return parts if len(owners) > 1 and {*owners} <= {*leaders(parts)} else ()


def summed(program: Program, size_bytes: int, ranks: tuple[int, ...]) -> Exchange:
    """The sum of ``size_bytes`` of gradients between some ranks of a program."""
    return Exchange("all_reduce", size_bytes, ranks, levelled=bool(parts_of(program, size_bytes, ranks)))
