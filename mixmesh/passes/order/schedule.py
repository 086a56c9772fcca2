"""Chooses the execution order: what every rank computes when, and therefore when exchanges start and are
awaited.

The events of a step as a graph (``StepGraph``) are forward and backward computations, split weight gradients,
collectives, the sum of every parameter's gradient, and the optimizer. The b-level of a task is the least time
for which the step goes on once the task has begun,

level(t) = seconds(t) + max over successors s of level(s),

and a list scheduler lets every resource (the computing thread of a rank, each process group) begin the task
of the highest level among those that can begin first (HeteroG, CoNEXT'20, section 4.2; Graham, 1969). A
collective begins as soon as its source is ready and is awaited where its result is used.

Unlike HeteroG, all ranks follow one order, that of the program's text, and the backward pass is its reverse,
because autograd works like that. So the forward tasks are scheduled and give an order, then the backward
tasks are scheduled and give another in reverse; the one that the simulator finds faster is kept. One order
for all ranks is also one order for every process group, without which ranks would wait for each other
forever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from ...cost.outline import is_synchronised
from ...cost.placed import Sheet
from ...lang.ir import Program
from ...step import Step
from .graph import Group, StepGraph, Turn, step_graph

GAIN = 0.005  # share of the estimated step: an order that gains less is not simulated


@dataclass(frozen=True)
class Played:
    """Tasks in the order in which they began, the seconds at which each could begin, and the end of the
    last."""

    order: tuple[int, ...]
    ready_s: dict[int, float]
    end_s: float


# (when a task is ready, when it could begin), in seconds: the task with the least goes first
Priority = Callable[[int, float, float], tuple]


@dataclass(frozen=True)
class Part:
    """Some tasks of a graph: the ``successors`` and ``followers`` of each among them, and the number of its
    predecessors among them (``missing``)."""

    successors: dict[int, list[int]]
    followers: dict[int, list[int]]  # only for tasks that have any
    missing: dict[int, int]

    @classmethod
    def of(cls, graph: StepGraph, tasks: Sequence[int]) -> Part:
        inside = set(tasks)
        successors = {t: [s for s in graph.tasks[t].successors if s in inside] for t in tasks}
        followers = {
            t: [s for s in these if s in inside] for t in tasks if (these := graph.tasks[t].followers)
        }
        missing: dict[int, int] = dict.fromkeys(tasks, 0)
        for after in (*successors.values(), *followers.values()):
            for s in after:
                missing[s] += 1
        return cls(successors, followers, missing)

    def begun(self, t: int) -> Iterator[int]:
        """Yields the tasks whose predecessors have all begun, now that ``t`` has."""
        for s in (*self.successors[t], *self.followers.get(t, ())):
            self.missing[s] -= 1
            if not self.missing[s]:
                yield s


def play(graph: StepGraph, tasks: Sequence[int], priority: Priority | None = None) -> Played:
    """Issues ``tasks`` in order of ``priority`` among those whose predecessors were issued; without a
    priority in the given order, predecessors first. Every rank computes, and every process group carries, one
    at a time."""
    part = Part.of(graph, tasks)
    kinds = range(len(graph.tasks[0].seconds))
    clock = [0.0 for _ in kinds]
    at_once = clock
    arrival: dict[int, list[float]] = {}  # by kind of rank, the time when the inputs of a task are there
    free: dict[Group, float] = defaultdict(float)
    waiting = [t for t in tasks if not part.missing[t]]
    ready_s: dict[int, float] = dict.fromkeys(waiting, 0.0)
    as_given = iter(tasks)
    order, end_s = [], 0.0
    while waiting:
        if priority is None:
            t = next(as_given)
        elif len(waiting) == 1:
            t = waiting[0]
        else:
            now = max(clock)
            t = min([(*priority(t, ready_s[t], max(now, ready_s[t])), t) for t in waiting])[-1]
        waiting.remove(t)
        task, needs = graph.tasks[t], arrival.pop(t, at_once)
        order.append(t)
        if task.group is None:
            clock = ends = [max(c, a) + s for c, a, s in zip(clock, needs, task.seconds)]
        else:
            start = max(max(clock[k], needs[k]) for k in task.kinds)
            free[task.group] = carried = max(start, free[task.group]) + task.seconds[0]
            ends = [carried if k in task.kinds else a for k, a in zip(kinds, needs)]
        end_s = max(end_s, *ends)
        for s in part.successors[t]:
            arrival[s] = list(map(max, arrival[s], ends)) if s in arrival else ends
        for s in part.begun(t):
            waiting.append(s)
            ready_s[s] = max(arrival.get(s, at_once))
    return Played(tuple(order), ready_s, end_s)


def in_turn(graph: StepGraph, tasks: Sequence[int], place: Callable[[int], Any]) -> list[int]:
    """``tasks`` sorted by ``place``, except that predecessors come first: the next task is always the one
    with the least place among those that may follow."""
    part = Part.of(graph, tasks)
    waiting = [(place(t), t) for t in tasks if not part.missing[t]]
    heapify(waiting)
    order = []
    while waiting:
        _, t = heappop(waiting)
        order.append(t)
        for s in part.begun(t):
            heappush(waiting, (place(s), s))
    return order


class Orders:
    """The orders of one program's instructions: as they stand, and as a list scheduler has them."""

    def __init__(self, program: Program, step: Step[Sheet]) -> None:
        """Takes ``step``, that of the same instructions under any ratios and buckets."""
        self.program = program
        exchanges = step.outline.exchanges
        self.communicating = {name for (name, _), exchange in exchanges.items() if exchange is not None}
        self.graph = step_graph(program, step)
        instructions = program.instructions
        # leaves, and conversions of parameters, are placed where they are needed
        self.main = [
            n
            for n, i in enumerate(instructions)
            if not i.is_leaf and not (i.is_redistribution and program.producers[i.inputs[0]].is_leaf)
        ]
        self.placed = set(self.main)
        self.index = {r: n for n, i in enumerate(instructions) for r in i.results if r is not None}

    def listed(self, t: int, _: float, begin: float) -> tuple:
        """A list scheduler's priority: earliest start, then collectives, then the highest level."""
        task = self.graph.tasks[t]
        return task.turn is Turn.LAST, begin, task.group is None, -self.graph.levels[t], t

    def forward(self) -> list[int]:
        """The instructions in the order of a list schedule of the forward tasks."""
        return self._in_order_of(play(self.graph, self._forward(self.main), self.listed))

    def first_come(self) -> list[int]:
        """The order of an executor without priorities: computations run in the order in which they become
        ready."""
        played = play(self.graph, self._forward(self.main), lambda t, ready, begin: (begin, ready, t))
        return self._in_order_of(played)

    def _in_order_of(self, played: Played) -> list[int]:
        return self.complete([self.graph.instruction_of[t] for t in played.order])

    def backward(self) -> list[int]:
        """The instructions in the reverse order of a list schedule of the backward tasks."""
        graph, instruction_of = self.graph, self.graph.instruction_of
        played = play(graph, self._back(self.main), self.listed)
        back = [instruction_of[t] for t in reversed(played.order) if t in instruction_of]
        place = {n: float(k) for k, n in enumerate(back)}
        # a value without a gradient is placed no later than it was
        earliest = float(len(back))
        for n in reversed(self.main):
            earliest = min(earliest, place.setdefault(n, earliest - 0.5))
        tasks = in_turn(graph, self._forward(self.main), lambda t: place[instruction_of[t]])
        return self.complete([instruction_of[t] for t in tasks])

    def _forward(self, order: Sequence[int]) -> list[int]:
        return [self.graph.forward[n] for n in order]

    def _back(self, order: Sequence[int]) -> list[int]:
        """The backward tasks of these instructions and of the parameters, in reverse order."""
        backward, before, after = self.graph.backward, self.graph.before, self.graph.after
        rest = [n for n in range(len(self.program.instructions)) if n not in self.placed]
        out: list[int] = []
        for n in reversed((*rest, *order)):
            if n in backward:
                out += (*before.get(n, ()), backward[n], *after.get(n, ()))
        return out

    def forward_pass(self, order: Sequence[int]) -> Played:
        """The forward pass in an order of all instructions."""
        return play(self.graph, self._forward([n for n in order if n in self.placed]))

    def backward_pass(self, order: Sequence[int]) -> Played:
        """The backward pass, made like ``forward_pass``."""
        back = {t: k for k, t in enumerate(self._back([n for n in order if n in self.placed]))}
        tasks = self.graph.tasks
        return play(self.graph, in_turn(self.graph, [*back], lambda t: (tasks[t].turn, back[t])))

    def estimate_s(self, order: Sequence[int]) -> float:
        return self.forward_pass(order).end_s + self.backward_pass(order).end_s

    def complete(self, main: Sequence[int]) -> list[int]:
        """All instructions: those of ``main`` in this order, each after the ones it needs; gathers of
        parameters come one operator ahead."""
        instructions = self.program.instructions
        out: list[int] = []
        added: set[int] = set()
        ahead = 0  # position before the last operator that had parameters gathered

        def need(n: int) -> Iterator[int]:
            for m in dict.fromkeys(self.index[name] for name in instructions[n].inputs):
                if m not in added and m not in self.placed:
                    yield from need(m)
                    added.add(m)
                    yield m

        for n in main:
            mine = list(need(n))
            if any(r in self.communicating for m in mine for r in instructions[m].results):
                # a parameter that is also used in shards comes before its first user
                needed = {self.index[name] for m in mine for name in instructions[m].inputs} - {*mine}
                at = max([ahead, *(out.index(m) + 1 for m in needed)])
                out[at:at] = mine
                ahead = len(out)
            else:
                out += mine
            out.append(n)
        stood = self.placed | added
        return out + [n for n in range(len(instructions)) if n not in stood]


def reordered(program: Program, step: Step[Sheet]) -> tuple[Program, ...]:
    """The program in orders that are faster according to list scheduling, the fastest first. ``step`` is of
    the same instructions."""
    orders = Orders(program, step)
    as_it_stands = tuple(range(len(program.instructions)))
    seconds_of: dict[tuple[int, ...], float] = {}
    for order in (as_it_stands, tuple(orders.forward()), tuple(orders.backward())):
        if order not in seconds_of:
            seconds_of[order] = orders.estimate_s(order)
    now_s = seconds_of[as_it_stands]
    better = sorted((s, order) for order, s in seconds_of.items() if s < now_s * (1 - GAIN))
    return tuple(in_order(program, order) for _, order in better)


def in_order(program: Program, order: Sequence[int]) -> Program:
    return program.changed(instructions=tuple(program.instructions[n] for n in order))


def ready_seconds(program: Program, step: Step[Sheet]) -> dict[str, float]:
    """For each parameter whose gradient is summed, the time in the backward pass at which the slowest rank
    has it."""
    orders = Orders(program, step)
    backward = orders.backward_pass(range(len(program.instructions)))
    return {
        i.result: backward.ready_s[orders.graph.backward[n]]
        for n, i in enumerate(program.instructions)
        if is_synchronised(program, i)
    }
