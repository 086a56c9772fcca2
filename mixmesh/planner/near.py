"""Reduces the gradients of the proposals near the fastest, each in its fastest way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..cost.placed import supports
from .budget import CARE_STEPS, SOME_STEPS, Budget
from .hap import DDP_TUNED
from .passes import REDUCTIONS
from .proposal import Proposal
from .task import HOPEFUL, Task

# planners whose proposals are reduced immediately, so that later ones must beat the result
REDUCED_AT_ONCE = (DDP_TUNED, "hap")

EXCHANGED = 0.05  # least share of the step in exchanges within its passes that is worth the time
FEW, SHORT_FEW = 4, 1  # proposals of a planner that are tried; the latter if the budget is short


def reduced_near(task: Task, proposals: Sequence[Proposal]) -> dict[str, Proposal]:
    """The best proposal of each planner, after reducing gradients in the fastest way in those near the
    fastest: a program that is slower while its reductions are exposed may become the fastest once they are
    hidden."""
    best: dict[str, Proposal] = {}
    for proposal in sorted(proposals, key=lambda p: p.key):
        best.setdefault(proposal.planner, proposal)
    fastest = min(best.values(), key=lambda p: p.key)
    near = [p for p in proposals if p.feasible and p.timeline.step_s <= HOPEFUL * fastest.timeline.step_s]
    by_key: dict[tuple, Proposal] = {}
    for proposal in sorted(near, key=lambda p: p.key):
        by_key.setdefault((proposal.program.body, supports(proposal.program)), proposal)
    with task.timed("sync"):
        floor_s = {key: p.simulation.least_s(p.program)[0] for key, p in by_key.items()}
    # tries those first that would be fastest with all sums hidden. With a short budget, tries those first
    # that are fastest so far, and skips those that would not become the fastest by the gain of the one before
    tried: Counter[str] = Counter()
    left = 0.0  # share of a step
    budgets = {key: budget_for(p, task.budget) for key, p in by_key.items()}
    is_short = {key: not budget.is_ample for key, budget in budgets.items()}
    for key in sorted(by_key, key=lambda k: by_key[k].timeline.step_s if is_short[k] else floor_s[k]):
        proposal, planner, fastest_s = by_key[key], by_key[key].planner, fastest.timeline.step_s
        enough = tried[planner] >= (FEW if task.budget.is_ample else SHORT_FEW)
        if enough or floor_s[key] >= fastest_s:
            continue
        if is_short[key] and left * proposal.timeline.step_s > fastest_s:
            continue
        candidate = REDUCTIONS(task, proposal, budgets[key])
        if candidate is not proposal:
            tried[planner] += 1
            left = candidate.timeline.step_s / proposal.timeline.step_s
        task.summed |= {p.program.key for p in (proposal, candidate)}
        best[planner], fastest = (min(a, candidate, key=lambda p: p.key) for a in (best[planner], fastest))
    return best


def budget_for(proposal: Proposal, budget: Budget) -> Budget:
    """The budget for the passes of one proposal. It is ample if the program is small enough to be finished
    thoroughly, or if it is of medium size and waits for exchanges within its forward and backward pass, as
    with exact batch norm: many of these waits can be hidden."""
    size = len(proposal.program.instructions)
    if budget.pays_for(CARE_STEPS, size):
        return budget.ample
    waits = proposal.simulation.exchanged_s >= EXCHANGED * proposal.timeline.step_s
    return budget.ample if waits and budget.pays_for(SOME_STEPS, size) else budget
