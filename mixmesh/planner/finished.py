"""What every plan that was found gets at the end: the best ways to sum gradients, orders, buckets, and when
the gradients of weights are computed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import zip_longest

from ..cost.placed import supports
from .apart import GAIN, apart
from .hap import DDP_TUNED
from .ordered import ordered
from .synced import flat, is_hurried, synced, without_needless_directness
from .task import HOPEFUL, SMALL_INSTRUCTIONS, Proposal, Task

FEW = 8  # proposals that are finished
# of all small programs together but the first that there is time to finish
QUICK_INSTRUCTIONS = 2 * SMALL_INSTRUCTIONS
# times the step of the fastest so far: programs of several machines that were joined line by line gain more
JOINED_HOPEFUL = 2.0
SUMMED_AT_ONCE = (
    DDP_TUNED,
    "hap",
)  # so that planners that come later have that to beat


def finished_near(task: Task, proposals: Sequence[Proposal], *, quick: bool) -> list[Proposal]:
    """Those proposals, finished, that may become the fastest: the first, and some near it. Each program is
    looked at once on each set of devices."""
    first = min(proposals, key=lambda p: p.key)
    unlike: dict[tuple, Proposal] = {}
    for proposal in sorted(proposals, key=lambda p: p.key):
        key = id(proposal.program.instructions), supports(proposal.program), proposal.micro_batches
        if proposal.feasible and can_lead(proposal, first.timeline.step_s):
            unlike.setdefault(key, proposal)
    made = [finished(task, first, quick=quick)]
    instructions, most = (QUICK_INSTRUCTIONS, SMALL_INSTRUCTIONS) if quick else (sys.maxsize, sys.maxsize)
    others = [p for p in unlike.values() if p is not first and len(p.program.instructions) <= most]
    for proposal in of_every_set(task, others):
        step_s = min(p.timeline.step_s for p in made)
        needed = len(proposal.program.instructions)
        if len(made) < FEW and needed <= instructions and least_s(task, proposal)[0] < step_s * (1 - GAIN):
            instructions -= needed
            made.append(finished(task, proposal, quick=quick))
    return made


def of_every_set(task: Task, proposals: Sequence[Proposal]) -> list[Proposal]:
    """Those proposals in turns, one for each set of devices and then the next ones: programs of one set may
    be almost the same. Of a set first the one whose step may become the shortest."""
    by_set: dict[tuple[int, ...], list[Proposal]] = {}
    for proposal in proposals:
        by_set.setdefault(supports(proposal.program), []).append(proposal)
    turns = [sorted(some, key=lambda p: least_s(task, p)[1]) for some in by_set.values()]
    return [p for turn in zip_longest(*turns) for p in turn if p is not None]


def least_s(task: Task, proposal: Proposal) -> tuple[float, float]:
    """Two bounds of the proposal's step, in seconds, whatever comes of it: with free sums of gradients, and
    with these in one piece. In micro-steps both are what devices compute."""
    if proposal.micro_batches is not None:
        computing_s = max(proposal.timeline.compute_s)
        return computing_s, computing_s
    with task.timed("simulate"):
        return proposal.simulation.least_s(proposal.program)


def can_lead(proposal: Proposal, fastest_s: float) -> bool:
    """Whether a proposal may become the fastest, where one takes ``fastest_s``."""
    if proposal.planner == "two-level":
        return proposal.timeline.step_s <= JOINED_HOPEFUL * fastest_s
    return proposal.timeline.step_s - proposal.simulation.exchanged_s <= HOPEFUL * fastest_s


def finished(task: Task, proposal: Proposal, *, quick: bool) -> Proposal:
    """The proposal, or a faster form of it. There is always time for some (``is_hurried``)."""
    quick = quick and is_hurried(proposal)
    if proposal.micro_batches is None and id(proposal.program) not in task.summed:
        proposal = synced(task, proposal, quick=quick)
    return arranged(task, proposal, quick=quick)


def arranged(task: Task, proposal: Proposal, *, quick: bool) -> Proposal:
    """The proposal, whose gradients are summed in their best way, or a faster form of it. One in micro-steps
    keeps its order."""
    if proposal.micro_batches is None:
        proposal = apart(task, ordered(task, proposal, quick=quick), quick=quick)
    return without_needless_directness(flat(task, proposal))
