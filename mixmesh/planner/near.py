"""Reduces the gradients of the proposals near the fastest, each in its fastest way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..cost.placed import supports
from .budget import CARE_STEPS, SOME_STEPS, Budget
from .hap import DDP_TUNED
from .passes import REDUCTIONS
from .proposal import Proposal, ranks_of
from .task import HIDDEN, HOPEFUL, Task

# planners whose proposals are reduced immediately, so that later ones must beat the result
REDUCED_AT_ONCE = (DDP_TUNED, "hap")

EXCHANGED = 0.05  # least share of the step in exchanges within its passes that is worth the time
# proposals of a planner that are tried on a set of devices in a search and without one; if the budget for a
# proposal is short, so many on any devices
IN_A_SEARCH, USUAL, SHORT = 4, 2, 1
SETS = 4  # sets of devices that are tried for a planner


def reduced_near(task: Task, proposals: Sequence[Proposal]) -> list[Proposal]:
    """The proposals that may become the fastest, after reducing their gradients in the fastest way; those
    that this leaves as they are do not count. A program that is slower while its reductions are exposed may
    become the fastest once they are hidden, so each set of devices has its own trials.

    Tries those with a short budget first, since what they reach may show that the others, which take longer
    to try, cannot become the fastest. Among those, tries the fastest so far first, and skips those that would
    not become the fastest by the gain of the one before. Among the others, tries those first that would be
    fastest with all sums hidden.
    """
    fastest_s = min([p.timeline.step_s for p in proposals if p.feasible], default=float("inf"))
    tried: Counter[tuple] = Counter()  # by planner and devices; with a short budget by planner
    left = 0.0  # share of a step
    reduced: list[Proposal] = []
    for proposal, floor_s, budget in worth_reducing(task, proposals, fastest_s):
        step_s, planner = proposal.timeline.step_s, proposal.planner
        is_short = not budget.is_ample
        most = SHORT if is_short else IN_A_SEARCH if task.budget.is_ample else USUAL
        counted = (planner, *(() if is_short else supports(proposal.program)))
        other_sets = sum(where[0] == planner for where in tried if where != counted)
        if tried[counted] >= most or other_sets >= SETS or floor_s >= fastest_s:
            continue
        if is_short and left * step_s > fastest_s:
            continue
        candidate = REDUCTIONS(task, proposal, budget)
        task.summed |= {p.program.key for p in (proposal, candidate)}
        if candidate is not proposal:
            tried[counted] += 1
            left = candidate.timeline.step_s / step_s
            fastest_s = min(fastest_s, candidate.timeline.step_s)
            reduced.append(candidate)
    return reduced


def worth_reducing(
    task: Task, proposals: Sequence[Proposal], fastest_s: float
) -> list[tuple[Proposal, float, Budget]]:
    """The proposals that may become faster than ``fastest_s``, each program once, in the order in which they
    are to be tried: each with a lower bound in seconds and its budget."""
    unlike: dict[tuple, Proposal] = {}
    for proposal in sorted(proposals, key=lambda p: p.key):
        if proposal.feasible:
            unlike.setdefault((proposal.program.body, supports(proposal.program)), proposal)
    found = []
    for proposal in unlike.values():
        with task.timed("sync"):
            floor_s = least_reduced_s(proposal)
        budget, step_s = budget_for(proposal, task.budget), proposal.timeline.step_s
        if step_s <= (fastest_s + HIDDEN * floor_s if budget.is_ample else HOPEFUL * fastest_s):
            order = budget.is_ample, floor_s if budget.is_ample else step_s
            found.append((order, proposal, floor_s, budget))
    return [(p, floor_s, budget) for _, p, floor_s, budget in sorted(found, key=lambda entry: entry[0])]


def least_reduced_s(proposal: Proposal) -> float:
    """A rough lower bound of the proposal's step, in seconds, if all reductions of gradients are hidden and
    owners share the optimizer's work."""
    program, simulation = proposal.program, proposal.simulation
    hidden_s, _ = simulation.least_s(program)
    return hidden_s - max(simulation.sheet.optimizer_s(program)) * (1 - 1 / len(ranks_of(program)))


def budget_for(proposal: Proposal, budget: Budget) -> Budget:
    """The budget for the passes of one proposal. It is ample if the program is small enough to be finished
    thoroughly, or if it is of medium size and waits for exchanges within its forward and backward pass, as
    with exact batch norm: many of these waits can be hidden."""
    size = len(proposal.program.instructions)
    if budget.pays_for(CARE_STEPS, size):
        return budget.ample
    waits = proposal.simulation.exchanged_s >= EXCHANGED * proposal.timeline.step_s
    return budget.ample if waits and budget.pays_for(SOME_STEPS, size) else budget
