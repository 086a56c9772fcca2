"""Owners for the gradients of a plan that was found, where the simulator says that they pay.

All buckets meet in one way: on gloo, mixtures were slower than simulated (``mixmesh bench sync``).
"""

from __future__ import annotations

from dataclasses import replace

from ..buckets import with_buckets
from ..ir import Program
from ..sync import best_sync
from ..zero import zero_stage
from .task import BUCKET_BYTES, Proposal, Task

EXPOSED = 0.05  # of the step that sums of gradients must take, beyond what hides
MARGIN = 0.02  # of the step that must be saved: owners keep optimizers to those that work by element


def synced(task: Task, proposal: Proposal) -> Proposal:
    """The proposal with its gradients summed in the fastest of their ways."""
    program, simulation = proposal.program, proposal.simulation
    with task.timed("sync"):
        floor_s, _ = simulation.least_s(program)
    step_s = proposal.timeline.step_s
    if zero_stage(program) or step_s - floor_s < EXPOSED * step_s:
        return proposal

    def seconds(p: Program) -> float:
        return task.simulation(p).step_s(p)

    # what is gathered in small pieces is there for the first layers while the others still travel
    made = best_sync(with_buckets(program, BUCKET_BYTES[0]), task.costs, seconds, mixed=False)
    found = task.judge(proposal.planner, made)
    if not found.feasible or found.timeline.step_s > step_s * (1 - MARGIN):
        return proposal
    return replace(found, gap=proposal.gap)
