"""Improves a plan's execution order, packed sums and buckets, if the simulator says that it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...lang.ir import Program, regions
from ...passes.buckets import merged
from ...passes.order import (
    GAIN,
    coalesced,
    in_runs,
    levels_of_sums,
    most_saved_s,
    ready_seconds,
    reordered,
    separated,
)
from ..budget import Budget
from ..proposal import Proposal
from ..task import Task
from .row import Pass

# steps that the budget must pay for: up to 3000 instructions, some sixty consecutive layers
ORDER_STEPS = 2
# number of runs into which a level's sums are packed: one, or two so that one travels during computing
RUNS = (1, 2)


def ordered(task: Task, proposal: Proposal, budget: Budget) -> Proposal:
    """The proposal in its fastest order, with its small sums unpacked or packed, and with its fastest
    buckets; unchanged if none is faster and fits. If the budget does not pay for it, a program without small
    sums keeps its order, and sums packed into one run are not tried."""
    if not waits(proposal):
        return proposal  # no other order makes a rank faster that computes all the time
    large = not budget.pays_for(ORDER_STEPS, len(proposal.program.instructions))
    unpacked = separated(proposal.program)
    forms = summed_otherwise(task, proposal, unpacked, RUNS[1:] if large else RUNS)
    keeps = large and not (forms and unpacked is proposal.program)
    best = proposal if keeps else in_order(task, proposal)
    for program in forms:
        if waits(best):
            candidate = task.best_buckets(proposal.planner, program)
            best = min(best, in_order(task, candidate), key=lambda p: p.key)
    with task.timed("order"):
        ready_s = ready_seconds(best.program, best.simulation.step)
        program = merged(best.program, task.costs, ready_s)
        faster = best.simulation.step_s(program) < best.timeline.step_s
    if faster:
        candidate = task.judge(proposal.planner, program, best.simulation)
        best = min(best, candidate, key=lambda p: p.key)
    return replace(best, gap=proposal.gap)


def waits(proposal: Proposal) -> bool:
    """Whether the rank that computes longest waits for the others."""
    return proposal.timeline.step_s > max(proposal.timeline.compute_s) * (1 + GAIN)


def in_order(task: Task, proposal: Proposal) -> Proposal:
    """The proposal in the fastest of its orders."""
    with task.timed("order"):
        programs = reordered(proposal.program, proposal.simulation.step)
    candidates = [task.best_buckets(proposal.planner, program) for program in programs]
    return min((proposal, *candidates), key=lambda p: p.key)


def summed_otherwise(
    task: Task, proposal: Proposal, unpacked: Program, every: Sequence[int]
) -> list[Program]:
    """The proposal's program with its small sums unpacked, and packed into several runs per level, except for
    the form that it already has. Empty if this cannot save enough."""
    program, step_s = proposal.program, proposal.timeline.step_s
    if regions(program):
        return []
    with task.timed("order"):
        groups = levels_of_sums(unpacked, task.costs)
        if most_saved_s(unpacked, task.costs, groups) < GAIN * step_s:
            return []
        forms = [unpacked, *(coalesced(unpacked, in_runs(groups, runs)) for runs in every)]
    by_sums = {num_sums(form): form for form in forms}
    by_sums.pop(num_sums(program), None)
    return list(by_sums.values())


def num_sums(program: Program) -> int:
    return sum(i.op == "all_reduce" for i in program.instructions)


ORDER = Pass(
    "order",
    "the order of instructions, small all-reduces packed or apart, and the buckets of gradients",
    lambda task, proposal, budget: ordered(task, proposal, budget),
)
