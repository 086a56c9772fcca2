"""What every plan that was found gets at the end: the best ways to sum gradients, orders, buckets, and when
the gradients of weights are computed."""

from __future__ import annotations

from .apart import apart
from .ordered import ordered
from .synced import flat, synced, without_needless_directness
from .task import Proposal, Task

SUMMED_AT_ONCE = ("hap",)  # in the fastest of all ways, so that planners that come later have that to beat


def finished(task: Task, proposal: Proposal, *, quick: bool) -> Proposal:
    """The proposal, or a faster form of it."""
    if proposal.micro_batches is None and proposal.planner not in SUMMED_AT_ONCE:
        proposal = synced(task, proposal, quick=quick)
    return arranged(task, proposal, quick=quick)


def arranged(task: Task, proposal: Proposal, *, quick: bool) -> Proposal:
    """The proposal, whose gradients are summed in their best way, or a faster form of it. One in micro-steps
    keeps its order."""
    if proposal.micro_batches is None:
        proposal = apart(task, ordered(task, proposal, quick=quick), quick=quick)
    return without_needless_directness(flat(task, proposal))
