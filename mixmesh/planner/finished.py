"""What every plan that was found gets at the end: the best ways to sum gradients, orders, buckets, and when
the gradients of weights are computed."""

from __future__ import annotations

from collections.abc import Sequence

from .apart import GAIN, apart
from .hap import DDP_TUNED
from .ordered import ordered
from .synced import HOPEFUL, flat, synced, without_needless_directness
from .task import Proposal, Task

SUMMED_AT_ONCE = (
    DDP_TUNED,
    "hap",
)  # so that planners that come later have that to beat


def finished_near(task: Task, proposals: Sequence[Proposal], *, quick: bool) -> list[Proposal]:
    """The best proposals of some planners, finished, that may become the fastest: the first, and those near
    it whose devices compute for less time than its step takes."""
    first, *others = sorted(proposals, key=lambda p: p.key)
    made = [finished(task, first, quick=quick)]
    seen = {id(first.program.instructions)}
    for proposal in others:
        step_s = min(p.timeline.step_s for p in made)
        near = proposal.feasible and proposal.timeline.step_s <= HOPEFUL * first.timeline.step_s
        hopeful = max(proposal.timeline.compute_s) < step_s * (1 - GAIN)
        if near and hopeful and id(proposal.program.instructions) not in seen:
            seen.add(id(proposal.program.instructions))
            made.append(finished(task, proposal, quick=quick))
    return made


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
