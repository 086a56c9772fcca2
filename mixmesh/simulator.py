"""The event simulator: a program's step as it unfolds on every rank.

Per rank a compute stream; per process group one channel on which collectives follow each other. A
collective of the forward or backward pass holds its ranks until it ends; the sum of a bucket of
gradients runs beside the backward pass. The step is the steady-state period: every rank begins with the
optimizer step of the step before, because nothing makes ranks wait between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cost import CostModel
from .cost.memory import peak_memory_bytes
from .cost.placed import exchange_of, held_share, is_computation, op_time, synchronised, work_type
from .ir import Instruction, Program


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a rank's stream (``compute`` or ``communication``) does."""

    rank: int
    stream: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One step, predicted or measured. ``peak_memory_bytes`` has one entry per rank."""

    step_s: float
    peak_memory_bytes: tuple[int, ...]
    compute_s: tuple[float, ...]
    communication_s: float
    events: tuple[Event, ...] = ()


def simulate(
    program: Program, costs: CostModel, *, optimizer_states: int = 2, events: bool = False
) -> Timeline:
    """Predicts one step of ``program``. ``optimizer_states`` is tensors per parameter (Adam: 2)."""
    run = _Run(program, costs, events)
    run.optimizer()
    for i in program.instructions:
        run.forward(i)
    for i in reversed(program.instructions):
        run.backward(i)
    return Timeline(
        run.finish(),
        peak_memory_bytes(program, costs, optimizer_states),
        tuple(run.busy),
        run.communication,
        tuple(run.events),
    )


class _Run:
    """The clocks of one simulated step."""

    def __init__(self, program: Program, costs: CostModel, keep_events: bool) -> None:
        self.program, self.costs, self.keep_events = program, costs, keep_events
        self.clock = [0.0] * program.world_size
        self.busy = [0.0] * program.world_size
        self.channel: dict[tuple[int, ...], float] = {}
        self.ready: dict[str, float] = {}  # results of collectives that nobody waits for yet
        self.communication = 0.0
        self.events: list[Event] = []
        self.buckets = gradient_buckets(program)
        self.waiting = {number: len(names) for number, names in self.buckets.items()}
        self.sums: list[int] = []

    def optimizer(self) -> None:
        for i in self.program.params:
            if i.result in self.program.requires_grad:
                for rank in self.program.participants(i.type):
                    share = held_share(self.program, i.type, rank)
                    self.compute(
                        rank, "optimizer", self.costs.optimizer_s(rank, i.type.value.size_bytes * share)
                    )

    def compute(self, rank: int, name: str, seconds: float) -> None:
        start = self.clock[rank]
        self.clock[rank] = start + seconds
        self.busy[rank] += seconds
        if self.keep_events and seconds > 0:
            self.events.append(Event(rank, "compute", name, start, start + seconds))

    def communicate(self, name: str, ranks: tuple[int, ...], seconds: float, *, waits: bool) -> float:
        """A collective; ``waits`` holds the compute streams until its end, which is returned."""
        start = max([self.clock[r] for r in ranks] + [self.channel.get(ranks, 0.0)])
        end = start + seconds
        self.channel[ranks] = end
        self.communication += seconds
        if waits:
            for r in ranks:
                self.clock[r] = end
        if self.keep_events:
            self.events += [Event(r, "communication", name, start, end) for r in ranks]
        return end

    def forward(self, i: Instruction) -> None:
        program = self.program
        for name in i.inputs:
            if name in self.ready:
                end = self.ready.pop(name)
                for rank in program.participants(program.types[name]):
                    self.clock[rank] = max(self.clock[rank], end)
        if is_computation(i):
            self.work(i, backward=False)
        exchange = exchange_of(program, i)
        if exchange is not None:
            hidden = i.result not in program.requires_grad
            end = self.communicate(i.op, exchange.ranks, exchange.seconds(self.costs), waits=not hidden)
            if hidden:
                self.ready[i.result] = end

    def work(self, i: Instruction, *, backward: bool) -> None:
        program, costs = self.program, self.costs
        t = work_type(program, i)
        for rank in program.participants(t):
            time = op_time(program, i, costs, costs.class_of[rank])
            curve = time.backward if backward else time.forward
            self.compute(rank, i.op, curve.at(held_share(program, t, rank)))

    def backward(self, i: Instruction) -> None:
        program = self.program
        if not any(r in program.requires_grad for r in i.results):
            return
        if is_computation(i):
            self.work(i, backward=True)
        exchange = exchange_of(program, i, backward=True)
        if exchange is not None:
            self.communicate(
                f"{exchange.name} grad", exchange.ranks, exchange.seconds(self.costs), waits=True
            )
        if synchronised(program, i):
            number = next(n for n, names in self.buckets.items() if i.result in names)
            self.waiting[number] -= 1
            self.issue()

    def issue(self) -> None:
        """Buckets whose gradients are complete, in order of their numbers."""
        for number in self.buckets:
            if number in self.sums:
                continue
            if self.waiting[number]:
                return
            names = self.buckets[number]
            size = sum(self.program.types[n].value.size_bytes for n in names)
            ranks = self.program.participants(self.program.types[names[0]])
            fit = self.costs.collective("all_reduce", ranks)
            self.communicate("all_reduce gradients", ranks, fit.seconds(size), waits=False)
            self.sums.append(number)

    def finish(self) -> float:
        return max([*self.clock, *self.channel.values()])


def gradient_buckets(program: Program) -> dict[int, tuple[str, ...]]:
    """Parameters whose gradients travel together, by bucket number, in the order of issue."""
    buckets: dict[int, list[str]] = {}
    for n, i in enumerate(program.params):
        if synchronised(program, i):
            buckets.setdefault(i.attr("bucket", n), []).append(i.result)
    return {number: tuple(buckets[number]) for number in sorted(buckets)}
