"""The event simulator: a program's step as it unfolds on every rank.

Per rank a compute stream; per process group one channel on which collectives follow each other. A
redistribution starts at its place and is awaited at its first use; in the backward pass it starts after
its first use and is awaited at its place, as the runtime has it. Nobody waits for the gradients of stored
shards, nor for the sum of a bucket of gradients. The step is the steady-state period: every rank begins
with the optimizer step of the step before, because nothing makes ranks wait between the two.

Every time is a maximum of sums of durations in a fixed order, so that no device or link that gets faster
can make the predicted step longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cost import CostModel
from .cost.memory import held_by_cut
from .cost.placed import (
    Exchange,
    Sheet,
    exchange_of,
    is_resharded,
    is_stored,
    supports,
    synchronised,
)
from .ir import Instruction, Program
from .timeline import Event, Timeline, bucket_name, gradient_name, repeated_name


def simulate(
    program: Program, costs: CostModel, *, optimizer_states: int = 2, events: bool = False
) -> Timeline:
    """Predicts one step of ``program``. ``optimizer_states`` is tensors per parameter (Adam: 2)."""
    return Simulation(program, costs, optimizer_states).run(program, events=events)


@dataclass(frozen=True, slots=True)
class _Step:
    """A run of computations, and what ends it."""

    works: tuple[tuple[int, str, str], ...]  # (work, name, operator)
    awaited: tuple[tuple[str, tuple[int, ...]], ...] = ()  # values on their way: (name, ranks)
    exchange: Exchange | None = None
    name: str = ""
    seconds: float = 0.0
    value: str = ""  # what the exchange brings, awaited later; empty if it never is
    gradient: str = ""  # a parameter whose gradient is complete


class Simulation:
    """A program ready to be simulated under other ratios and buckets: the order of what happens, with all
    times that do not depend on them."""

    def __init__(self, program: Program, costs: CostModel, optimizer_states: int = 2) -> None:
        self.costs = costs
        self.sheet = Sheet(program, costs)
        self.memory = held_by_cut(program, optimizer_states)
        self.forward = self._forward(program)
        self.backward = self._backward(program)
        self.forward_counts = self._counts(self.forward)
        self.backward_counts = self._counts(self.backward)
        self._sums: dict[Exchange, float] = {}

    def run(self, program: Program, *, events: bool = False) -> Timeline:
        """One step under the ratios and buckets of ``program``, whose instructions must be those that the
        simulation was made from."""
        if supports(program) != self.sheet.supports:
            raise ValueError("another set of ranks takes part: make another Simulation")
        run = _Run(self, program, events)
        run.optimizer()
        forward_s, backward_s = self.sheet.seconds(program)
        run.steps(self.forward, self.forward_counts, forward_s)
        run.steps(self.backward, self.backward_counts, backward_s)
        return Timeline(
            run.finish(),
            self.peak_memory_bytes(program),
            tuple(run.busy),
            run.communication,
            tuple(run.events),
        )

    def peak_memory_bytes(self, program: Program) -> tuple[int, ...]:
        held = self.sheet.held_bytes(self.memory, program)
        return tuple(round(self.costs.memory_constant_bytes(r) + size) for r, size in enumerate(held))

    def sum_seconds(self, summed: Exchange) -> float:
        if summed not in self._sums:
            self._sums[summed] = summed.seconds(self.costs)
        return self._sums[summed]

    def _forward(self, program: Program) -> list[_Step]:
        steps: list[_Step] = []
        works: list[tuple[int, str, str]] = []
        coming: dict[str, tuple[int, ...]] = {}

        def close(**what) -> None:
            steps.append(_Step(tuple(works), **what))
            works.clear()

        for n, i in enumerate(program.instructions):
            awaited = [name for name in dict.fromkeys(i.inputs) if name in coming]
            if awaited:
                close(awaited=tuple((name, coming.pop(name)) for name in awaited))
            if n in self.sheet.work_of:
                works.append((self.sheet.work_of[n], shown(i), i.op))
            exchange = exchange_of(program, i)
            if exchange is not None:
                coming[i.result] = exchange.ranks
                close(exchange=exchange, name=i.result, seconds=exchange.seconds(self.costs), value=i.result)
        close(awaited=tuple((name, ranks) for name, ranks in coming.items() if name == program.loss))
        return steps

    def _backward(self, program: Program) -> list[_Step]:
        steps: list[_Step] = []
        works: list[tuple[int, str, str]] = []
        starting: dict[int, list[Instruction]] = {}  # index of the first use -> redistributions
        used: set[str] = set()
        again: dict[int, list[Instruction]] = {}  # index of the last use -> gathers that are repeated
        for i in program.instructions:
            if i.is_redistribution and i.result in program.requires_grad and exchange_of(program, i):
                uses = self.sheet.uses.get(i.result, [])
                passed = [n for n in uses if self.sheet.flows[n]]
                if passed:
                    used.add(i.result)
                    starting.setdefault(passed[0], []).append(i)
                    if is_resharded(program, i) and passed[-1] == uses[-1]:
                        again.setdefault(uses[-1], []).append(i)

        def close(**what) -> None:
            steps.append(_Step(tuple(works), **what))
            works.clear()

        def start(i: Instruction, *, backward: bool, value: str) -> None:
            exchange = exchange_of(program, i, backward=backward)
            name = gradient_name(i.result) if backward else repeated_name(i.result)
            close(exchange=exchange, name=name, seconds=exchange.seconds(self.costs), value=value)

        for n in reversed(range(len(program.instructions))):
            i = program.instructions[n]
            for gather in again.get(n, ()):
                start(gather, backward=False, value=gather.result)
                close(awaited=((gather.result, exchange_of(program, gather).ranks),))
            if not self.sheet.flows[n]:
                continue
            if n in self.sheet.work_of:
                works.append((self.sheet.work_of[n], gradient_name(shown(i)), i.op))
            exchange = exchange_of(program, i, backward=True)
            if exchange is not None:
                if i.result not in used:  # the loss itself
                    start(i, backward=True, value=i.result)
                if not is_stored(program, i):
                    close(awaited=((i.result, exchange.ranks),))
            for moved in starting.get(n, ()):
                start(moved, backward=True, value="" if is_stored(program, moved) else moved.result)
            if synchronised(program, i):
                close(gradient=i.result)
        close()
        return steps

    def _counts(self, steps: list[_Step]) -> np.ndarray:
        """How often each work stands in each step."""
        counts = np.zeros((len(steps), len(self.sheet.works)))
        for row, step in zip(counts, steps):
            for work, _, _ in step.works:
                row[work] += 1
        return counts


def shown(i: Instruction) -> str:
    return next((r for r in i.results if r is not None), i.op)


class _Run:
    """The clocks of one simulated step."""

    def __init__(self, simulation: Simulation, program: Program, keep_events: bool) -> None:
        self.simulation, self.program, self.keep_events = simulation, program, keep_events
        self.clock = [0.0] * program.world_size
        self.busy = [0.0] * program.world_size
        self.channel: dict[tuple[int, ...], float] = {}
        self.ready: dict[str, float] = {}  # results of collectives that nobody waits for yet
        self.communication = 0.0
        self.events: list[Event] = []
        self.bucket_of: dict[str, int] = {}
        self.waiting: dict[int, int] = {}
        self.size: dict[int, int] = {}
        self.ranks: dict[int, tuple[int, ...]] = {}
        numbers = {i.result: i.attr("bucket", n) for n, i in enumerate(program.params)}
        for _, i in simulation.sheet.synchronised:
            number = self.bucket_of[i.result] = numbers[i.result]
            self.waiting[number] = self.waiting.get(number, 0) + 1
            self.size[number] = self.size.get(number, 0) + i.type.value.size_bytes
            self.ranks.setdefault(number, program.participants(i.type))
        self.unsent = sorted(self.waiting, reverse=True)

    def optimizer(self) -> None:
        for rank, seconds in enumerate(self.simulation.sheet.optimizer_s(self.program)):
            self.compute(rank, "optimizer", seconds)

    def compute(self, rank: int, name: str, seconds: float, op: str = "") -> None:
        start = self.clock[rank]
        self.clock[rank] = start + seconds
        self.busy[rank] += seconds
        if self.keep_events and seconds > 0:
            self.events.append(Event(rank, "compute", name, start, start + seconds, op))

    def communicate(self, name: str, exchange: Exchange, seconds: float) -> float:
        """A collective beside the compute streams; returns its end."""
        ranks = exchange.ranks
        start = max([self.clock[r] for r in ranks] + [self.channel.get(ranks, 0.0)])
        end = start + seconds
        self.channel[ranks] = end
        self.communication += seconds
        if self.keep_events:
            what = (name, start, end, exchange.name, exchange.size_bytes)
            self.events += [Event(r, "communication", *what) for r in ranks]
        return end

    def steps(self, steps: list[_Step], counts: np.ndarray, work_s: list[tuple[float, ...]]) -> None:
        table = np.array(work_s).reshape(len(work_s), self.program.world_size)
        for step, seconds in zip(steps, (counts @ table).tolist()):
            if self.keep_events:
                for work, name, op in step.works:
                    for rank, s in enumerate(work_s[work]):
                        self.compute(rank, name, s, op)
            elif step.works:
                for rank, s in enumerate(seconds):
                    self.clock[rank] += s
                    self.busy[rank] += s
            for name, ranks in step.awaited:
                end = self.ready.pop(name)
                for rank in ranks:
                    self.clock[rank] = max(self.clock[rank], end)
            if step.exchange is not None:
                end = self.communicate(step.name, step.exchange, step.seconds)
                if step.value:
                    self.ready[step.value] = end
            if step.gradient:
                self.waiting[self.bucket_of[step.gradient]] -= 1
                self.issue()

    def issue(self) -> None:
        """Buckets whose gradients are complete, in order of their numbers."""
        while self.unsent and not self.waiting[self.unsent[-1]]:
            number = self.unsent.pop()
            summed = Exchange("all_reduce", self.size[number], self.ranks[number])
            self.communicate(self.name(number), summed, self.simulation.sum_seconds(summed))

    def name(self, number: int) -> str:
        """The name of a bucket's sum; only events show it."""
        if not self.keep_events:
            return ""
        return bucket_name([name for name, bucket in self.bucket_of.items() if bucket == number])

    def finish(self) -> float:
        return max([*self.clock, *self.channel.values()])
