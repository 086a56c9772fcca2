"""Lets every rank compute weight gradients for itself from gathered factors (SFB), if that is faster."""

from __future__ import annotations

from dataclasses import replace

from ...lang.ir import Program, support
from ...passes.factors import best_factors
from ..proposal import Proposal
from ..task import Task
from .row import Pass


def factored(task: Task, proposal: Proposal) -> Proposal:
    """The proposal with weight gradients computed from gathered factors wherever that is faster, and with the
    shares that are then best."""

    def judge(program: Program) -> tuple[bool, float]:
        if program is proposal.program:
            return proposal.key  # it has its best buckets
        return task.best_buckets(proposal.planner, program).key

    with_sums = best_factors(proposal.program, task.costs, judge)
    if with_sums is None:
        return proposal
    simulation, ratio = task.simulation(with_sums), proposal.program.shares
    better = task.ratio(simulation, with_sums, support(ratio)) or ratio
    with_better = task.best_buckets(proposal.planner, with_sums.with_shares(better), simulation)
    candidates = (proposal, task.best_buckets(proposal.planner, with_sums, simulation), with_better)
    return replace(min(candidates, key=lambda p: p.key), gap=proposal.gap)


FACTORS = Pass(
    "factors",
    "weight gradients computed from gathered factors, if these are smaller than the gradients",
    lambda task, proposal, _: factored(task, proposal),
)
