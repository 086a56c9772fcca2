"""Marks the regions that the user checkpointed in a plan, so that the plan rematerialises them too.

A program that fits in memory only with regions of its own keeps those.
"""

from __future__ import annotations

from ...lang.ir import regions
from ...passes.checkpointing import user_regions, with_user_regions
from ..proposal import Proposal
from ..task import Task
from .row import Pass


def checkpointed(task: Task, proposal: Proposal) -> Proposal:
    """The proposal with the user's regions, simulated again."""
    region_of = user_regions(task.graph)
    if not region_of or regions(proposal.program):
        return proposal
    program = with_user_regions(proposal.program, region_of)
    simulation = task.simulation(program, accumulating=proposal.simulation.samples is not None)
    judged = task.judge(proposal.planner, program, simulation, micro_batches=proposal.micro_batches)
    return judged if judged.feasible else proposal


CHECKPOINTING = Pass(
    "checkpointing",
    "regions that the user checkpointed run again",
    lambda task, proposal, _: checkpointed(task, proposal),
    keeps_micro_batches=True,
)
