"""Makes all-reduces flat if that is as fast as hierarchical ones."""

from __future__ import annotations

from dataclasses import replace

from ...cost.sums import gradient_sums
from ..proposal import Proposal
from ..task import Task
from .row import Pass

SAME = 1e-6  # share of a step: less is rounding


def flat(task: Task, proposal: Proposal) -> Proposal:
    """The proposal without levels, if it is as fast without them and fits, or no sum is hierarchical: if both
    are equal in simulation, flat sums take less processor time. Memory differs because other ranks meet."""
    if proposal.program.levels is None:
        return proposal
    program = proposal.program.changed(levels=None)
    if not any(s.parts for s in gradient_sums(proposal.program)):
        return replace(proposal, program=program)
    with task.timed("sync"):
        timeline = proposal.simulation.run(program, proposal.micro_batches, usable_bytes=task.usable_bytes)
    is_slower = timeline.step_s > proposal.timeline.step_s * (1 + SAME)
    if is_slower or (proposal.feasible and not task.has_room(timeline)):
        return proposal
    return replace(proposal, program=program, timeline=timeline)


FLAT = Pass(
    "flat",
    "flat all-reduces where they are as fast as hierarchical ones",
    lambda task, proposal, _: flat(task, proposal),
    keeps_micro_batches=True,
)
