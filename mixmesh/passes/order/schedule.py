"""Execution order: when every rank computes what, and so when it starts and awaits what it exchanges.

A step's joint graph (``StepGraph``) has for every instruction a forward and a backward task, for every
parameter the sum of its gradient, and the optimizer. The b-level of a task is how long the step goes on at
least once it has begun,

    level(t) = seconds(t) + max over successors s of level(s),

and a list scheduler lets every resource (the computing thread of a rank, each process group) begin, of what
can begin first, the task of the highest level (HeteroG, CoNEXT'20, section 4.2; Graham, 1969). A collective
begins as soon as its source is there and is awaited where its result is used.

Where we depart from HeteroG: all ranks follow one order, that of the program's text, and the backward pass is
its reverse, since that is what autograd does. So the forward tasks are scheduled and the order is taken as it
is, then the backward tasks and it is taken in reverse; whichever the simulator finds faster is kept. One
order for all ranks is one order for every process group, without which ranks would wait for each other for
ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from ...cost.outline import synchronised
from ...cost.placed import Sheet
from ...lang.ir import Program
from .graph import Group, StepGraph, step_graph

GAIN = 0.005  # share of the estimated step below which an order is not worth a simulation


@dataclass(frozen=True)
class Played:
    """Tasks in the order in which they began, when each could begin, and when the last had ended."""

    order: tuple[int, ...]
    ready_s: dict[int, float]
    end_s: float


# (when a task is ready, when it could begin), in seconds: the least is first
Priority = Callable[[int, float, float], tuple]


def among(graph: StepGraph, tasks: Sequence[int]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """The successors of ``tasks`` that are among them, and how many predecessors of each are."""
    inside = set(tasks)
    successors = {t: [s for s in graph.tasks[t].successors if s in inside] for t in tasks}
    missing: dict[int, int] = dict.fromkeys(tasks, 0)
    for found in successors.values():
        for s in found:
            missing[s] += 1
    return successors, missing


def play(graph: StepGraph, tasks: Sequence[int], priority: Priority | None = None) -> Played:
    """Begins ``tasks`` one by one, of those whose predecessors among them have begun the one of the least
    ``priority``; without one as they stand, predecessors first. Every rank computes one at a time, every
    process group carries one at a time."""
    successors, missing = among(graph, tasks)
    kinds = range(len(graph.tasks[0].seconds))
    clock = [0.0 for _ in kinds]
    at_once = clock
    arrival: dict[int, list[float]] = {}  # when all that a task needs is there, by kind of rank
    free: dict[Group, float] = defaultdict(float)
    waiting = [t for t in tasks if not missing[t]]
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
            done = free[task.group] = max(start, free[task.group]) + task.seconds[0]
            ends = [done if k in task.kinds else a for k, a in zip(kinds, needs)]
        end_s = max(end_s, *ends)
        for s in successors[t]:
            arrival[s] = list(map(max, arrival[s], ends)) if s in arrival else ends
            missing[s] -= 1
            if not missing[s]:
                waiting.append(s)
                ready_s[s] = max(arrival[s])
    return Played(tuple(order), ready_s, end_s)


def in_turn(graph: StepGraph, tasks: Sequence[int], place: Callable[[int], Any]) -> list[int]:
    """``tasks`` by ``place`` as far as predecessors among them stand first: of those that may follow, the one
    of the least place does."""
    successors, missing = among(graph, tasks)
    waiting = [(place(t), t) for t in tasks if not missing[t]]
    heapify(waiting)
    order = []
    while waiting:
        _, t = heappop(waiting)
        order.append(t)
        for s in successors[t]:
            missing[s] -= 1
            if not missing[s]:
                heappush(waiting, (place(s), s))
    return order


class Orders:
    """The orders of one program's instructions: as they stand, and as a list scheduler has them."""

    def __init__(self, program: Program, sheet: Sheet) -> None:
        self.program, self.flows = program, sheet.flows
        self.communicating = {name for (name, _), exchange in sheet.exchanges.items() if exchange is not None}
        self.graph = step_graph(program, sheet)
        instructions = program.instructions
        # leaves, and what parameters are turned into, stand where they are needed
        self.main = [
            n
            for n, i in enumerate(instructions)
            if not i.is_leaf and not (i.is_redistribution and program.producers[i.inputs[0]].is_leaf)
        ]
        self.placed = set(self.main)
        self.index = {r: n for n, i in enumerate(instructions) for r in i.results if r is not None}

    def listed(self, t: int, _: float, begin: float) -> tuple:
        """A list scheduler's priority: what can begin first, collectives, the highest level."""
        return begin, self.graph.tasks[t].group is None, -self.graph.levels[t], t

    def forward(self) -> list[int]:
        """By list scheduling of the forward tasks."""
        played = play(self.graph, self.main, self.listed)
        return self.complete(played.order)

    def first_come(self) -> list[int]:
        """As an executor without priorities: what was ready first, forward."""
        return self.complete(play(self.graph, self.main, lambda t, ready, begin: (begin, ready, t)).order)

    def backward(self) -> list[int]:
        """By list scheduling of the backward tasks, in reverse."""
        played = play(self.graph, self._back(self.main), self.listed)
        back = [self.graph.backward(t) for t in reversed(played.order)]
        place = {n: float(k) for k, n in enumerate(back)}
        # a value that no gradient passes comes no later than it stood
        earliest = float(len(back))
        for n in reversed(self.main):
            earliest = min(earliest, place.setdefault(n, earliest - 0.5))
        return self.complete(in_turn(self.graph, self.main, place.__getitem__))

    def _back(self, order: Sequence[int]) -> list[int]:
        """The backward tasks of these instructions and of the parameters, in the reverse of the order."""
        flows, instructions = self.flows, self.program.instructions
        rest = [n for n, i in enumerate(instructions) if n not in self.placed]
        return [self.graph.backward(n) for n in reversed((*rest, *order)) if flows[n]]

    def forward_pass(self, order: Sequence[int]) -> Played:
        """The forward pass in an order of all instructions."""
        return play(self.graph, [n for n in order if n in self.placed])

    def backward_pass(self, order: Sequence[int]) -> Played:
        """As ``forward_pass``."""
        back = {t: k for k, t in enumerate(self._back([n for n in order if n in self.placed]))}
        tasks = self.graph.tasks
        return play(self.graph, in_turn(self.graph, [*back], lambda t: (tasks[t].group is None, back[t])))

    def estimate_s(self, order: Sequence[int]) -> float:
        return self.forward_pass(order).end_s + self.backward_pass(order).end_s

    def complete(self, main: Sequence[int]) -> list[int]:
        """All instructions: those of ``main`` in this order, what they need before them; what gathers
        parameters one operator ahead."""
        instructions = self.program.instructions
        out: list[int] = []
        done: set[int] = set()
        ahead = 0  # before the last operator that had parameters gathered

        def need(n: int) -> Iterator[int]:
            for m in dict.fromkeys(self.index[name] for name in instructions[n].inputs):
                if m not in done and m not in self.placed:
                    yield from need(m)
                    done.add(m)
                    yield m

        for n in main:
            mine = list(need(n))
            if any(r in self.communicating for m in mine for r in instructions[m].results):
                # a parameter that is used in shards too stands where the first of its users is
                known = {self.index[name] for m in mine for name in instructions[m].inputs} - {*mine}
                at = max([ahead, *(out.index(m) + 1 for m in known)])
                out[at:at] = mine
                ahead = len(out)
            else:
                out += mine
            out.append(n)
        stood = self.placed | done
        return out + [n for n in range(len(instructions)) if n not in stood]


def reordered(program: Program, sheet: Sheet) -> tuple[Program, ...]:
    """The program in orders that list scheduling thinks faster, the fastest first. ``sheet`` is of the same
    instructions."""
    orders = Orders(program, sheet)
    as_it_stands = tuple(range(len(program.instructions)))
    found: dict[tuple[int, ...], float] = {}
    for order in (as_it_stands, tuple(orders.forward()), tuple(orders.backward())):
        if order not in found:
            found[order] = orders.estimate_s(order)
    now_s = found[as_it_stands]
    better = sorted((s, order) for order, s in found.items() if s < now_s * (1 - GAIN))
    return tuple(in_order(program, order) for _, order in better)


def in_order(program: Program, order: Sequence[int]) -> Program:
    return program.changed(instructions=tuple(program.instructions[n] for n in order))


def ready_seconds(program: Program, sheet: Sheet) -> dict[str, float]:
    """Per parameter whose gradient is summed, when in the backward pass it is there on the slowest rank."""
    orders = Orders(program, sheet)
    backward = orders.backward_pass(range(len(program.instructions)))
    return {
        i.result: backward.ready_s[orders.graph.backward(n)]
        for n, i in enumerate(program.instructions)
        if synchronised(program, i)
    }
