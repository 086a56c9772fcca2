"""The proposals near the fastest, with their gradients reduced in the fastest way of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..cost.placed import supports
from .passes import REDUCTIONS
from .passes.reductions import QUICK_INSTRUCTIONS
from .proposal import Proposal
from .task import HOPEFUL, SMALL_INSTRUCTIONS, Task

EXCHANGED = 0.05  # share of the step that exchanges within its passes must take to be worth the time
FEW, QUICK_FEW = 4, 1  # proposals of a planner that are tried, of those that are


def best_synced(task: Task, proposals: Sequence[Proposal], *, quick: bool) -> dict[str, Proposal]:
    """The best of some proposals by planner, those near the fastest with their gradients summed in their
    fastest way: what is slower as long as nothing hides sums may be the fastest where something does."""
    best: dict[str, Proposal] = {}
    for proposal in sorted(proposals, key=lambda p: p.key):
        best.setdefault(proposal.planner, proposal)
    fastest = min(best.values(), key=lambda p: p.key)
    near = [p for p in proposals if p.feasible and p.timeline.step_s <= HOPEFUL * fastest.timeline.step_s]
    by_key: dict[tuple, Proposal] = {}
    for proposal in sorted(near, key=lambda p: p.key):
        by_key.setdefault((id(proposal.program.instructions), supports(proposal.program)), proposal)
    with task.timed("sync"):
        floor_s = {key: p.simulation.least_s(p.program)[0] for key, p in by_key.items()}
    # first those that hidden sums would leave fastest; where there is little time, those that are so far, and
    # and those of the others that would become faster if they gained as much as those before them
    tried: Counter[str] = Counter()
    left = 0.0  # share of a step
    hurried = {key: quick and is_hurried(p) for key, p in by_key.items()}
    for key in sorted(by_key, key=lambda k: by_key[k].timeline.step_s if hurried[k] else floor_s[k]):
        proposal, planner, fastest_s = by_key[key], by_key[key].planner, fastest.timeline.step_s
        enough = tried[planner] >= (QUICK_FEW if quick else FEW)
        if enough or floor_s[key] >= fastest_s:
            continue
        if hurried[key] and left * proposal.timeline.step_s > fastest_s:
            continue
        candidate = REDUCTIONS(task, proposal, quick=hurried[key])
        if candidate is not proposal:
            tried[planner] += 1
            left = candidate.timeline.step_s / proposal.timeline.step_s
        task.summed |= {id(p.program): p for p in (proposal, candidate)}
        best[planner], fastest = (min(a, candidate, key=lambda p: p.key) for a in (best[planner], fastest))
    return best


def is_hurried(proposal: Proposal) -> bool:
    """Whether a program is too large to be finished with care where there is little time. One of medium size
    is not if its passes wait for exchanges, as those of exact batch norm do: much of that can hide."""
    count = len(proposal.program.instructions)
    if count <= SMALL_INSTRUCTIONS:
        return False
    exchanged_s = proposal.simulation.exchanged_s
    return count > QUICK_INSTRUCTIONS or exchanged_s < EXCHANGED * proposal.timeline.step_s
