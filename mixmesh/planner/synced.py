"""Owners for the gradients of a plan that was found, where the simulator says that they pay."""

from __future__ import annotations

from dataclasses import replace

from ..buckets import with_buckets
from ..ir import Program
from ..sync import best_sync
from ..zero import zero_stage
from .task import BUCKET_BYTES, Proposal, Task

EXPOSED = 0.05  # of the step that sums of gradients must take, beyond what hides


def synced(task: Task, proposal: Proposal) -> Proposal:
    """The proposal with its buckets summed in the fastest of their ways."""
    program, simulation = proposal.program, proposal.simulation
    with task.timed("sync"):
        floor_s, _ = simulation.least_s(program)
    step_s = proposal.timeline.step_s
    if zero_stage(program) or step_s - floor_s < EXPOSED * step_s:
        return proposal

    def judge(program: Program) -> tuple[bool, float]:
        return task.judge(proposal.planner, program, step="sync").key

    best = proposal
    # what is gathered in small pieces is there for the first layers while the others still travel
    for bucketed in (program, with_buckets(program, BUCKET_BYTES[0])):
        made = best_sync(bucketed, task.costs, judge)
        if made is not None:
            best = min(best, task.judge(proposal.planner, made), key=lambda p: p.key)
    return replace(best, gap=proposal.gap)
