"""The joint graph of a step, forward and backward, and the b-levels of its tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ...base.lazy import lazy
from ...cost.exchanges import Exchange
from ...cost.outline import purpose_of, synchronised
from ...cost.placed import Sheet
from ...lang.ir import Instruction, Program, cell_bytes, cells, owned_type
from ...lang.ir.samples import draws_numbers
from ...step.repeats import repeats

Group = tuple[str, tuple[int, ...]]  # a process group: what for, and its ranks


@dataclass(frozen=True, slots=True)
class StepTask:
    """A piece of work that a step does in one go. ``seconds`` are per kind of rank; a collective has a
    ``group``, and takes equally long on all ``kinds`` that meet."""

    seconds: tuple[float, ...]
    group: Group | None
    kinds: tuple[int, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class StepGraph:
    """The tasks of a step in topological order: forward by instruction, backward in reverse, the optimizer.

    The backward of a parameter is the sum of its gradient, that of a redistribution the gradient's.
    """

    tasks: tuple[StepTask, ...]

    def backward(self, n: int) -> int:
        """The task of the backward of instruction ``n``. Its forward is task ``n``."""
        return len(self.tasks) - 2 - n

    @lazy
    def levels(self) -> tuple[float, ...]:
        """b-levels in seconds."""
        out = [0.0] * len(self.tasks)
        for t in range(len(self.tasks) - 1, -1, -1):
            task = self.tasks[t]
            out[t] = max(task.seconds) + max((out[s] for s in task.successors), default=0.0)
        return tuple(out)


def step_graph(program: Program, sheet: Sheet) -> StepGraph:
    """The joint graph of a program under its ratios. ``sheet`` may be of other ratios."""
    costs = sheet.costs
    kind_of, firsts = _kinds(program, costs.class_of)
    forward_s, backward_s = sheet.seconds(program, ranks=firsts)
    nothing = (0.0,) * len(firsts)
    count = len(program.instructions)

    known: dict[Exchange, tuple[tuple[float, ...], tuple[int, ...]]] = {}

    def task(exchange: Exchange | None, purpose: str, seconds, successors) -> StepTask:
        if exchange is None:
            return StepTask(seconds, None, (), tuple(successors))
        if exchange not in known:
            kinds = tuple(dict.fromkeys(kind_of[r] for r in exchange.ranks))
            known[exchange] = (exchange.seconds(costs),) * len(firsts), kinds
        took, kinds = known[exchange]
        return StepTask(took, (purpose, exchange.ranks), kinds, tuple(successors))

    after = _users(sheet)
    before: dict[int, list[int]] = defaultdict(list)
    for n, users in enumerate(after):
        for m in users:
            before[m].append(n)
    # the second run of a region is part of the backward of its last computation
    again = {
        at: [backward_s[sheet.again_work_of[n]] for n in region.members]
        for at, region in repeats(program).items()
    }
    forward, backward = [], []
    for n, i in enumerate(program.instructions):
        work = sheet.work_of.get(n)
        back = [2 * count - 1 - n] if sheet.flows[n] else []
        seconds = nothing if work is None else forward_s[work]
        moved = sheet.exchanges[i.result, False] if i.is_redistribution else None
        purpose = "data" if moved is None else purpose_of(program, i)
        forward.append(task(moved, purpose, seconds, after[n] + back))
        seconds = backward_s[work] if back and work is not None else nothing
        if n in again:
            seconds = tuple(map(sum, zip(seconds, *again[n])))
        ends = [2 * count - 1 - m for m in before[n] if sheet.flows[m]] if back else []
        exchange, purpose = _of_gradient(sheet, i)
        backward.append(task(exchange, purpose, seconds, ends or [2 * count]))
    took_s = sheet.optimizer_s(program)
    optimizer = StepTask(tuple(took_s[r] for r in firsts), None, (), ())
    return StepGraph((*forward, *reversed(backward), optimizer))


def _kinds(program: Program, class_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """Per rank its kind, ranks of one device and one share of everything; the first rank of each kind."""
    numbers: dict[tuple, int] = {}
    firsts: list[int] = []
    kind_of = []
    for rank, key in enumerate(zip(class_of, *(ratio for _, ratio in program.ratios))):
        if key not in numbers:
            numbers[key] = len(numbers)
            firsts.append(rank)
        kind_of.append(numbers[key])
    return kind_of, firsts


def _users(sheet: Sheet) -> list[list[int]]:
    """Per instruction those that use its results. Random numbers depend on the order in which they are
    drawn, so that one draw counts as the user of the one before."""
    program = sheet.program
    out = []
    drawn: int | None = None
    for n, i in enumerate(program.instructions):
        out.append(sorted({m for r in i.results if r is not None for m in sheet.uses.get(r, ())}))
        if draws_numbers(i.op):
            if drawn is not None:
                out[drawn].append(n)
            drawn = n
    return out


def _of_gradient(sheet: Sheet, i: Instruction) -> tuple[Exchange | None, str]:
    """The collective in the backward of an instruction, and what its process group is for."""
    program = sheet.program
    if synchronised(program, i):
        name = "all_reduce" if owned_type(program, i) is None else "reduce_scatter"
        size_bytes, ranks = i.type.value.size_bytes, program.participants(i.type)
        if i.args[0] in program.copies:
            shared = cells(program, program.copies[i.args[0]][0])
            mine = [cell for cell in shared if not set(cell.ranks).isdisjoint(ranks)]
            size_bytes = max((cell_bytes(i.type.value, cell) for cell in mine), default=0)
            ranks = tuple(sorted({r for cell in mine for r in cell.ranks}))
        return Exchange(name, size_bytes, ranks), "gradient"
    flows = i.is_redistribution and i.result in program.requires_grad
    if not flows:
        return None, "data"
    return sheet.exchanges[i.result, True], purpose_of(program, i)
