"""The works of a program: computations with equal costs, regardless of the ranks that take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..lang.ir import Cut, Instruction, Program, Shard, region_of, wgrad_of
from .calls import Kind
from .curve import ZERO
from .model import CostModel, OpTime
from .outline import Outline, is_factored

# by work and rank, of the forward and of the backward pass
PassSeconds = tuple[list[tuple[float, ...]], list[tuple[float, ...]]]


@dataclass(frozen=True, slots=True)
class Work:
    """Computations with equal costs: an operator's times per device class, and how its work is cut."""

    times: tuple[OpTime, ...]
    cut: Cut


@dataclass(frozen=True, eq=False)
class Table:
    """The part of a cost table that depends only on a program's instructions, not on its ratios or shard
    owners.

    ``borders`` are redistributions from one ratio to another, ``ratio_names`` the ratios named in types.
    Computations and works are numbered: ``factor_work_of``, ``again_work_of`` and ``wgrad_work_of`` map a
    computation to the work of a weight gradient from factors, of a second run, and of a split weight
    gradient. ``seconds`` caches the seconds of works on ranks.
    """

    kinds: Sequence[Kind | None]
    borders: tuple[Instruction, ...]
    ratio_names: frozenset[str | None]
    works: Sequence[Work]
    work_of: dict[int, int]
    factor_work_of: dict[int, int]
    again_work_of: dict[int, int]
    wgrad_work_of: dict[int, int]
    uses: dict[str, list[int]]
    flows: tuple[bool, ...]
    seconds: dict[tuple, PassSeconds] = field(default_factory=dict)


def table_of(outline: Outline, costs: CostModel) -> Table:
    """The works of a program on the devices of ``costs``."""
    program = outline.program
    borders = tuple(i for i in program.instructions if _moves_borders(program, i))
    works: list[Work] = []
    work_of: dict[int, int] = {}  # index of a computation -> index of its work
    factor_work_of: dict[int, int] = {}  # a computation with sfb -> the work of its weight gradient
    again_work_of: dict[int, int] = {}  # a computation in a region -> its second run
    wgrad_work_of: dict[int, int] = {}  # a computation with wgrad -> the work of its weight gradient
    numbers: dict[tuple[int, Cut, str], int] = {}

    def number(times: int, cut: Cut, part: str, each: tuple[OpTime, ...]) -> int:
        """The number of a work; ``each`` is the time that each device class takes for it."""
        own = numbers.setdefault((times, cut, part), len(works))
        if own == len(works):
            works.append(Work(each, cut))
        return own

    calls: dict[tuple, int] = {}  # numbers of calls that cost alike
    times: list[tuple[OpTime, ...]] = []
    # for each kind and other cost-relevant attributes: its work, and the works of its weight gradient and
    # second run
    works_by_kind: dict[tuple[Kind, str, bool], tuple[int, int | None, int | None]] = {}
    for n, (i, kind) in enumerate(zip(program.instructions, outline.kinds)):
        if kind is None:
            continue
        apart = "factors" if is_factored(i) else "wgrad" if wgrad_of(i) else ""
        key_of_work = (kind, apart, region_of(i) is not None)
        if key_of_work not in works_by_kind:
            call, grads = kind.call, kind.grads
            inputs_cut = costs.cut(call, [t.placement for t in kind.inputs])
            key = (i.plain, call.inputs, call.outputs, grads, inputs_cut)
            at = calls.setdefault(key, len(times))
            if at == len(times):
                times.append(tuple(costs.op(call, grads, c, inputs_cut) for c in range(len(costs.classes))))
            cut = kind.work_type.cut
            gradient: int | None = None
            if apart:
                rest, product = split_by_factors(program, i, times[at])
                # the factors are gathered, so the work is not cut
                cut_too = cut if apart == "wgrad" else cut.whole
                own, gradient = number(at, cut, "own", rest), number(at, cut_too, apart, product)
            else:
                own = number(at, cut, "", times[at])
            again: int | None = None
            if region_of(i) is not None:
                second = tuple(OpTime(ZERO, t.forward) for t in times[at])
                again = number(at, cut, "again", second)
            works_by_kind[key_of_work] = own, gradient, again
        work_of[n], gradient_work, again_work = works_by_kind[key_of_work]
        if gradient_work is not None:
            (wgrad_work_of if apart == "wgrad" else factor_work_of)[n] = gradient_work
        if again_work is not None:
            again_work_of[n] = again_work
    names = frozenset(t.ratio for i in program.instructions for t in i.types)
    return Table(
        outline.kinds,
        borders,
        names,
        works,
        work_of,
        factor_work_of,
        again_work_of,
        wgrad_work_of,
        outline.uses,
        outline.flows,
    )


def _moves_borders(program: Program, i: Instruction) -> bool:
    """Whether a redistribution goes from one ratio to another."""
    if not i.is_redistribution:
        return False
    ends = program.types[i.inputs[0]], i.type
    return all(isinstance(t.placement, Shard) for t in ends) and ends[0].ratio != ends[1].ratio


def split_by_factors(
    program: Program, i: Instruction, times: tuple[OpTime, ...]
) -> tuple[tuple[OpTime, ...], tuple[OpTime, ...]]:
    """Splits the times of a product into those of its weight gradient and the rest. Of two products in the
    backward pass one is the weight gradient."""
    share = 0.5 if i.inputs[0] in program.requires_grad else 0.0
    own = tuple(OpTime(t.forward, t.backward.scaled(share) if share else ZERO) for t in times)
    return own, tuple(OpTime(ZERO, t.backward.scaled(1 - share)) for t in times)
