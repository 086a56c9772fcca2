"""Regions that the user checkpointed, in the plan that was found: they are computed again there too.

A program that fits in memory only with regions of its own keeps those."""

from __future__ import annotations

from ..lang.ir import Program, regions, with_regions
from ..lang.ir.recompute import updated_buffers
from ..passes.recomputation import can_run_again
from .task import Proposal, Task


def checkpointed(task: Task, proposal: Proposal) -> Proposal:
    """The proposal with the user's regions, timed anew."""
    wanted = {r: n.region for n in task.graph.nodes if n.region is not None for r in n.results}
    if not wanted or regions(proposal.program):
        return proposal
    made = with_regions(proposal.program, members(proposal.program, wanted))
    simulation = task.simulation(made, accumulating=proposal.simulation.samples is not None)
    judged = task.judge(proposal.planner, made, simulation, micro_batches=proposal.micro_batches)
    return judged if judged.feasible else proposal


def members(program: Program, wanted: dict[str | None, int]) -> dict[int, int]:
    """Indices of the computations of a program that are in regions, by number; ``wanted`` is by result."""
    stale = updated_buffers(program)
    return {
        n: wanted[i.results[0]]
        for n, i in enumerate(program.instructions)
        if i.results and i.results[0] in wanted and can_run_again(program, n, stale)
    }
