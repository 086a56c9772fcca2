"""The events of a step as tasks with their dependencies, and the b-levels of the tasks.

A step has its events in one order. A list scheduler looks for others, so only the necessary part of that
order is kept: a computation needs its inputs, a gradient the gradients of all uses, the second run of a
region and a second gather the gradient that triggers them, and a weight gradient what its ``wgrad`` says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ...base.lazy import lazy
from ...cost.exchanges import Exchange
from ...cost.outline import is_synchronised
from ...cost.placed import Sheet
from ...lang.ir import Instruction, Program, beside_points, cell_bytes, cells, owned_type
from ...lang.ir.samples import draws_numbers
from ...step import Compute, Start, Step
from ...step.events import BACKWARD, LOCAL, PRODUCT, REPEATED, WEIGHT, Pass, Sink
from ...step.works import works_by_part

Group = tuple[str, tuple[int, ...]]  # a process group: its purpose and its ranks
Seconds = tuple[float, ...]


class Turn(IntEnum):
    """When a rank reaches an event whose needs are met."""

    AT_ONCE = 0  # a collective on complete values starts at once
    IN_ORDER = 1  # a computation, or a gather that it starts, takes its turn
    LAST = 2  # comes after everything else in the pass


@dataclass(frozen=True, slots=True)
class StepTask:
    """An event of a step. ``seconds`` are per kind of rank; a collective has a ``group``, and takes the same
    time on all participating ``kinds``. ``successors`` begin after its end, ``followers`` after its start."""

    seconds: Seconds
    group: Group | None
    kinds: tuple[int, ...]
    successors: tuple[int, ...]
    followers: tuple[int, ...]
    turn: Turn


@dataclass(frozen=True)
class StepGraph:
    """The tasks of a step in topological order: forward, backward, the sums of gradients, the optimizer.

    By the index of an instruction: its ``forward``; its ``backward``, which for a redistribution is the
    gradient's collective and for a parameter its sum; and the tasks ``before`` and ``after`` that: second
    gathers, factors, split weight gradients.
    """

    tasks: tuple[StepTask, ...]
    forward: Mapping[int, int]
    backward: Mapping[int, int]
    before: Mapping[int, Sequence[int]]
    after: Mapping[int, Sequence[int]]

    @lazy
    def levels(self) -> tuple[float, ...]:
        """The b-level of each task in seconds."""
        out = [0.0] * len(self.tasks)
        for t in range(len(self.tasks) - 1, -1, -1):
            task = self.tasks[t]
            out[t] = max(task.seconds) + max((out[s] for s in task.successors), default=0.0)
        return tuple(out)

    @lazy
    def instruction_of(self) -> dict[int, int]:
        """For each task, the instruction whose forward or backward it is."""
        return {t: n for places in (self.forward, self.backward) for n, t in places.items()}


def step_graph(program: Program, step: Step[Sheet]) -> StepGraph:
    """The tasks of a program's step under its ratios. ``step`` may be that of other ratios."""
    builder = _Builder(program, step.outline)
    builder.forward_pass(step.forward)
    builder.backward_pass(step.backward)
    builder.sums()
    return builder.graph()


class _Builder:
    """Adds the tasks of a step one by one."""

    def __init__(self, program: Program, sheet: Sheet) -> None:
        self.program, self.sheet = program, sheet
        self.kind_of, self.firsts = _kinds(program, sheet.costs.class_of)
        self.forward_s, self.backward_s = sheet.seconds(program, ranks=self.firsts)
        self.nothing: Seconds = (0.0,) * len(self.firsts)
        self.work_of = works_by_part(sheet)
        self.seconds: list[Seconds] = []
        self.groups: list[tuple[Group | None, tuple[int, ...]]] = []
        self.turns: list[Turn] = []
        self.successors: list[list[int]] = []
        self.followers: dict[int, list[int]] = defaultdict(list)
        self.forward: dict[int, int] = {}
        self.backward: dict[int, int] = {}
        self.before: dict[int, list[int]] = defaultdict(list)
        self.after: dict[int, list[int]] = defaultdict(list)
        self.gradients: dict[str, list[int]] = defaultdict(
            list
        )  # for each value, the tasks that its gradient needs
        self.again: dict[str, int] = {}  # second gathers by value
        self.known: dict[Exchange, tuple[Seconds, tuple[int, ...]]] = {}

    def add(
        self,
        seconds: Seconds,
        needs: Iterable[int],
        exchange: Exchange | None = None,
        purpose: str = "data",
        turn: Turn = Turn.IN_ORDER,
    ) -> int:
        """Adds a task after those that it ``needs``: a collective, if it has an ``exchange``."""
        task = len(self.seconds)
        group: Group | None = None
        kinds: tuple[int, ...] = ()
        if exchange is not None:
            if exchange not in self.known:
                meeting = tuple(dict.fromkeys(self.kind_of[r] for r in exchange.ranks))
                took_s = exchange.seconds(self.sheet.costs)
                self.known[exchange] = (took_s,) * len(self.firsts), meeting
            seconds, kinds = self.known[exchange]
            group = purpose, exchange.ranks
        self.seconds.append(seconds)
        self.groups.append((group, kinds))
        self.turns.append(turn)
        self.successors.append([])
        for need in dict.fromkeys(needs):
            self.successors[need].append(task)
        return task

    def start(self, order: Pass, event: Start, needs: Iterable[int]) -> int:
        """Adds the start of a redistribution, of a gradient's redistribution, or of a gather."""
        if event.number == LOCAL:
            return self.add(self.nothing, needs)
        exchange, purpose = order.exchanges[event.number]
        turn = Turn.IN_ORDER if event.part in (REPEATED, PRODUCT) else Turn.AT_ONCE
        return self.add(self.nothing, needs, exchange, purpose, turn)

    # --- passes ------------------------------------------------------------------------------------------

    def forward_pass(self, order: Pass) -> None:
        makers: dict[str, int] = {}
        drawn: list[int] = []  # tasks that draw so far: random numbers are drawn in order
        for event in order.script.events:
            if not isinstance(event, Compute | Start | Sink):
                continue
            i = self.program.instructions[event.at]
            needs = [makers[name] for name in i.inputs if name in makers]
            if isinstance(event, Compute):
                drawing = draws_numbers(i.op)
                task = self.add(
                    self.forward_s[self.work_of[event.part][event.at]], [*needs, *drawn * drawing]
                )
                drawn = [task] if drawing else drawn
            elif isinstance(event, Start):
                task = self.start(order, event, needs)
            else:
                task = self.add(self.nothing, needs)
            self.forward[event.at] = task
            makers.update((r, task) for r in i.results if r is not None)

    def backward_pass(self, order: Pass) -> None:
        runs_again: list[Compute] = []  # instructions of the region whose backward is next
        gathers: list[Start] = []  # gathers that the next backward starts
        factors: dict[int, list[int]] = defaultdict(list)
        products: list[Compute] = []
        for event in order.script.events:
            if isinstance(event, Compute):
                if event.part == REPEATED:
                    runs_again.append(event)
                elif event.part == WEIGHT:
                    self.weight(event.at)
                else:
                    self.gather_again(order, event.at, gathers)
                    self.compute(event.at, runs_again)
                    runs_again, gathers = [], []
            elif isinstance(event, Start):
                if event.part == REPEATED:
                    gathers.append(event)
                elif event.part == PRODUCT:
                    task = self.start(order, event, self.needs(event.at))
                    factors[event.at].append(task)
                    self.before[event.at].append(task)
                    products += [event.product] if event.product is not None else []
                else:
                    self.gradient(order, event)
        for product in products:
            self.product(product, factors[product.at])

    def needs(self, n: int) -> list[int]:
        """The tasks that the backward of an instruction needs: the gradients of its results, its forward."""
        i = self.program.instructions[n]
        gradients = [t for r in i.results if r is not None for t in self.gradients.get(r, ())]
        return [*gradients, self.forward[n]]

    def gather_again(self, order: Pass, n: int, gathers: Sequence[Start]) -> None:
        """Second gathers before the backward of instruction ``n``."""
        for event in gathers:
            task = self.start(order, event, self.needs(n))
            self.again[self.program.instructions[event.at].result] = task
            self.before[n].append(task)

    def compute(self, n: int, runs_again: Sequence[Compute]) -> None:
        """Adds the backward of a computation, with the second run of the region that ends with it."""
        program, i = self.program, self.program.instructions[n]
        seconds = self.backward_s[self.work_of[BACKWARD][n]]
        reads = list(i.inputs)
        for event in runs_again:
            again_s = self.backward_s[self.work_of[REPEATED][event.at]]
            seconds = tuple(map(sum, zip(seconds, again_s)))
            reads += program.instructions[event.at].inputs
        gathered = [self.again[name] for name in reads if name in self.again]
        is_apart = n in program.wgrads or n in self.sheet.factor_work_of
        first = self.before.get(n, ()) if n in program.wgrads else ()  # its weight's gradient, if it has one
        task = self.add(seconds, [*self.needs(n), *gathered, *first])
        self.backward[n] = task
        for position, name in enumerate(i.inputs):
            if name in program.requires_grad and not (is_apart and position == 1):
                self.gradients[name].append(task)

    def weight(self, n: int) -> None:
        """Adds the separate computation of a weight gradient."""
        is_last, carrier = self.program.wgrads[n] == "last", self.carriers.get(n)
        turn = Turn.LAST if is_last else Turn.IN_ORDER
        task = self.add(self.backward_s[self.work_of[WEIGHT][n]], self.needs(n), turn=turn)
        self.gradients[self.program.instructions[n].inputs[1]].append(task)
        if carrier is not None:
            self.followers[self.backward[carrier]].append(task)
        (self.after if is_last or carrier is not None else self.before)[n].append(task)

    @lazy
    def carriers(self) -> dict[int, int]:
        """Maps each product whose weight gradient overlaps a collective to that collective's
        redistribution."""
        places = {i.result: n for n, i in enumerate(self.program.instructions) if i.is_redistribution}
        return {n: places[b.collective] for n, b in beside_points(self.program).items()}

    def gradient(self, order: Pass, event: Start) -> None:
        """Adds the gradient of a redistribution."""
        i = self.program.instructions[event.at]
        task = self.backward[event.at] = self.start(order, event, self.needs(event.at))
        self.gradients[i.inputs[0]].append(task)

    def product(self, product: Compute, factors: Sequence[int]) -> None:
        """Adds a weight's gradient from gathered factors, after the end of the pass."""
        i = self.program.instructions[product.at]
        task = self.add(self.backward_s[self.work_of[PRODUCT][product.at]], factors, turn=Turn.LAST)
        self.gradients[i.inputs[1]].append(task)
        self.after[product.at].append(task)

    def sums(self) -> None:
        """Adds the sum of each parameter's gradient, and the optimizer."""
        ends_before = len(self.forward)
        for n, i in enumerate(self.program.instructions):
            if i.op == "param" and i.result in self.program.requires_grad:
                exchange = _sum_of(self.program, i)
                needs = self.gradients.get(i.result, ())
                self.backward[n] = self.add(self.nothing, needs, exchange, "gradient", Turn.AT_ONCE)
        took_s = self.sheet.optimizer_s(self.program)
        ends = [t for t in range(ends_before, len(self.seconds)) if not self.successors[t]]
        self.add(tuple(took_s[r] for r in self.firsts), ends)

    def graph(self) -> StepGraph:
        rows = zip(self.seconds, self.groups, self.successors, self.turns)
        tasks = tuple(
            StepTask(seconds, *group, tuple(successors), tuple(self.followers.get(t, ())), turn)
            for t, (seconds, group, successors, turn) in enumerate(rows)
        )
        return StepGraph(tasks, self.forward, self.backward, self.before, self.after)


def _kinds(program: Program, class_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """The kind of each rank, ranks of one kind having the same device and the same share of everything; and
    the first rank of each kind."""
    numbers: dict[tuple, int] = {}
    firsts: list[int] = []
    kind_of = []
    for rank, key in enumerate(zip(class_of, *(ratio for _, ratio in program.ratios))):
        if key not in numbers:
            numbers[key] = len(numbers)
            firsts.append(rank)
        kind_of.append(numbers[key])
    return kind_of, firsts


def _sum_of(program: Program, param: Instruction) -> Exchange | None:
    """The separate sum of a parameter's gradient over ranks; None if there is no such sum."""
    if not is_synchronised(program, param):
        return None
    name = "all_reduce" if owned_type(program, param) is None else "reduce_scatter"
    size_bytes, ranks = param.type.value.size_bytes, program.participants(param.type)
    if param.args[0] in program.copies:
        shared = cells(program, program.copies[param.args[0]][0])
        mine = [cell for cell in shared if not set(cell.ranks).isdisjoint(ranks)]
        size_bytes = max((cell_bytes(param.type.value, cell) for cell in mine), default=0)
        ranks = tuple(sorted({r for cell in mine for r in cell.ranks}))
    return Exchange(name, size_bytes, ranks)
