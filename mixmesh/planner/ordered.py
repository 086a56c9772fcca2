"""The execution order and the buckets of a plan that was found, where the simulator says that they pay."""

from __future__ import annotations

from dataclasses import replace

from ..buckets import merged
from ..order import GAIN, ready_seconds, reordered
from .task import Proposal, Task

QUICK_INSTRUCTIONS = 3000  # some sixty layers, of which each follows from the one before


def ordered(task: Task, proposal: Proposal, *, quick: bool = False) -> Proposal:
    """The proposal in the fastest of its orders, with the fastest of its buckets; itself if none is faster
    and fits. If it is to be ``quick``, a large program keeps its order."""
    if proposal.timeline.step_s <= max(proposal.timeline.compute_s) * (1 + GAIN):
        return proposal  # a rank that always computes does not get faster by another order
    best = proposal
    large = quick and len(proposal.program.instructions) > QUICK_INSTRUCTIONS
    with task.timed("order"):
        programs = () if large else reordered(proposal.program, proposal.simulation.sheet)
    for program in programs:
        best = min(best, task.best_buckets(proposal.planner, program), key=lambda p: p.key)
    with task.timed("order"):
        ready_s = ready_seconds(best.program, best.simulation.sheet)
        program = merged(best.program, task.costs, ready_s)
        faster = best.simulation.step_s(program) < best.timeline.step_s
    if faster:
        made = task.judge(proposal.planner, program, best.simulation)
        best = min(best, made, key=lambda p: p.key)
    return replace(best, gap=proposal.gap)
