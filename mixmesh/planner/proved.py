"""Proves how much more the chosen program costs than the cheapest, under the prices and shares with which it
was found."""

from __future__ import annotations

from dataclasses import replace

from ..passes.order import separated
from ..search.synthesis import prove
from .hap import shape_of
from .passes import SHARES
from .proposal import Proposal
from .task import Task

CHEAPER = 1e-6  # relative saving from which another program is examined


def proved(task: Task, proposal: Proposal, limit_s: float) -> Proposal:
    """The proposal with the gap that HiGHS proves within ``limit_s``, or the program that HiGHS finds, if
    that is faster in simulation. The unchanged proposal if no search found it."""
    searched = task.searched.get(shape_of(separated(proposal.program)))
    if searched is None:
        return proposal
    problem, path = searched
    task.progress("planning: exact search")
    with task.timed("exact"):
        exact = prove(problem, path, limit_s)
    best = replace(proposal, gap=replace(path, bound_s=exact.bound_s).gap)
    if exact.cost_s < path.cost_s * (1 - CHEAPER):
        program = task.spell(problem, exact).with_shares(proposal.program.shares)
        candidate = replace(task.best_buckets(proposal.planner, task.packed(program)), gap=exact.gap)
        best = min(best, SHARES(task, candidate, task.budget), key=lambda p: p.key)
    return best
