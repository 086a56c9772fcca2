"""The end of planning: finds the best ways to sum gradients, execution orders, buckets, and times to compute
weight gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import isclose

from ..cost.placed import supports
from .budget import CARE_STEPS, SOME_STEPS, Budget
from .near import budget_for
from .passes import ARRANGING, REDUCTIONS
from .passes.weight_gradients import GAIN
from .planners import BY_NAME
from .proposal import Proposal
from .task import HOPEFUL, Task

ALIKE = 1e-4  # relative difference of times below which only one of two programs is finished
# number of proposals that are finished; those with micro-batches, which keep their order and sums, do not
# count
FEW = 8
# share of the budget for a step of every further program: enough for three of the largest that are examined
# thoroughly
SHARE = 0.3
# this many more are finished if they would become the fastest by gaining this much more than the largest gain
# so far
LIKELY_FEW, LIKELY_GAIN = 2, 0.95
NEAR = 1.03  # relative to the fastest step: one more is finished that is not small
# relative to the fastest step so far: programs joined from several machines gain more
JOINED_HOPEFUL = 2.0
# factor on the budget for passes of a joined program, which has the instructions of every machine: up to 3000
# instructions are examined
JOINED_SHARE = 1.5


def finish(task: Task, chosen: Proposal, every: Sequence[Proposal]) -> Proposal:
    """Finishes the proposals near ``chosen``, the fastest so far, and returns the fastest result. A last
    resort with micro-batches gains little; the others may gain more, and are tried if no search for such
    plans was made."""
    usual = [p for p in every if p.feasible and BY_NAME[p.planner].is_usual]
    is_usual = BY_NAME[chosen.planner].is_usual
    near: list[Proposal] = []
    if usual and (is_usual or not task.budget.is_ample):
        near = finished_near(task, [chosen, *usual] if is_usual else usual)
    if not is_usual:
        near.append(finished(task, chosen))
    task.record(near)
    return min(near, key=lambda p: p.key)


def finished_near(task: Task, proposals: Sequence[Proposal]) -> list[Proposal]:
    """Finishes the fastest proposal and those near it that may overtake it, and then, as far as the budget
    allows, slower ones whose bound is lower: another order may hide their gradient sums, such as those of
    data parallelism on all devices. Among programs that are almost the same, one is finished on each set of
    devices."""
    first, hopeful, slow = unlike_ones(proposals)
    finished_ones, left = [finished(task, first)], FEW - 1
    visits = task.budget.part(SHARE).visits
    finished_ones += [finished(task, p) for p in medium_near(task, first, hopeful)]
    left_out, gain = [], finished_ones[0].timeline.step_s / first.timeline.step_s
    for proposal, in_order_s in (*in_turns(task, hopeful), *in_turns(task, slow)):
        step_s = min(p.timeline.step_s for p in finished_ones)
        needed = 0 if proposal.micro_batches is not None else len(proposal.program.instructions)
        reordered_s = max(*proposal.timeline.compute_s, in_order_s - most_hidden_s(proposal))
        is_time = not needed or (left > 0 and needed <= visits)
        if reordered_s >= step_s * (1 - GAIN):
            continue
        if not is_time:
            left_out.append(proposal)
            continue
        left, visits = left - (needed > 0), visits - needed
        finished_ones.append(finished(task, proposal))
        gain = min(gain, finished_ones[-1].timeline.step_s / proposal.timeline.step_s)
    for proposal in sorted(left_out, key=lambda p: p.key)[:LIKELY_FEW]:
        if LIKELY_GAIN * gain * proposal.timeline.step_s < min(p.timeline.step_s for p in finished_ones):
            finished_ones.append(finished(task, proposal))
    return finished_ones


def unlike_ones(proposals: Sequence[Proposal]) -> tuple[Proposal, list[Proposal], list[Proposal]]:
    """The fastest proposal, those that may still become faster than it, and a few others, which may be slower
    only because their gradient sums are not hidden yet. If several are almost equal, the fastest stands for
    them."""
    ordered = sorted((p for p in proposals if p.feasible), key=lambda p: p.key)
    first = min(proposals, key=lambda p: p.key)
    hopeful: list[Proposal] = []
    for proposal in ordered:
        is_new = not any(are_alike(proposal, other) for other in (first, *hopeful))
        if is_new and can_lead(proposal, first.timeline.step_s):
            hopeful.append(proposal)
    slow: list[Proposal] = []
    for proposal in ordered:
        if len(slow) < FEW and not any(are_alike(proposal, other) for other in (first, *hopeful, *slow)):
            slow.append(proposal)
    return first, hopeful, slow


def in_turns(task: Task, proposals: Sequence[Proposal]) -> list[tuple[Proposal, float]]:
    """The proposals that are small enough for a thorough examination, in their turns, each with its least
    seconds."""
    small = [p for p in proposals if task.budget.pays_for(CARE_STEPS, len(p.program.instructions))]
    return by_turns_of_sets([(p, least_s(task, p)) for p in small])


def medium_near(task: Task, first: Proposal, others: Sequence[Proposal]) -> list[Proposal]:
    """The fastest of ``others``, which are in order, that is almost as fast as the first, on other devices,
    too large for a thorough examination and small enough for some; empty if there is none. The first may be
    too large for any."""
    for proposal in others:
        if proposal.timeline.step_s > NEAR * first.timeline.step_s:
            return []
        size = len(proposal.program.instructions)
        is_medium = task.budget.pays_for(SOME_STEPS, size) and not task.budget.pays_for(CARE_STEPS, size)
        if is_medium and supports(proposal.program) != supports(first.program):
            return [proposal]
    return []


def are_alike(one: Proposal, other: Proposal) -> bool:
    """Whether two proposals are the same program, or take about the same times on the same devices, which
    suggests that they are mostly the same."""
    if one.micro_batches != other.micro_batches or supports(one.program) != supports(other.program):
        return False
    times = zip(
        (one.timeline.step_s, *one.timeline.compute_s), (other.timeline.step_s, *other.timeline.compute_s)
    )
    return one.program.instructions is other.program.instructions or all(
        isclose(a, b, rel_tol=ALIKE) for a, b in times
    )


def by_turns_of_sets(bounded: Sequence[tuple[Proposal, float]]) -> list[tuple[Proposal, float]]:
    """Proposals, each with its least seconds, in turns: one for each set of devices, then the next one for
    each, because programs on one set may be almost the same. Within a set they are sorted by their seconds.
    """
    by_set: dict[tuple[tuple[int, ...], ...], list[tuple[Proposal, float]]] = {}
    for proposal, in_order_s in bounded:
        by_set.setdefault(supports(proposal.program), []).append((proposal, in_order_s))
    turns = [sorted(some, key=lambda pair: pair[1]) for some in by_set.values()]
    return [pair for turn in zip_longest(*turns) for pair in turn if pair is not None]


def least_s(task: Task, proposal: Proposal) -> float:
    """A rough lower bound, in seconds, of the step in its present order, with all gradients of a set of ranks
    in one sum."""
    if proposal.micro_batches is not None:
        return proposal.timeline.step_s
    with task.timed("simulate"):
        return proposal.simulation.least_s(proposal.program)[1]


def can_lead(proposal: Proposal, fastest_s: float) -> bool:
    """Whether a proposal may still become faster than ``fastest_s``."""
    if is_joined(proposal):
        return proposal.timeline.step_s <= JOINED_HOPEFUL * fastest_s
    return proposal.timeline.step_s - most_hidden_s(proposal) <= HOPEFUL * fastest_s


def is_joined(proposal: Proposal) -> bool:
    """Whether the proposal is joined from the programs of several machines."""
    return proposal.planner == "two-level"


def most_hidden_s(proposal: Proposal) -> float:
    """Seconds of exchanges within the passes that another order may hide, limited by the seconds of
    computing."""
    return min(proposal.simulation.exchanged_s, max(proposal.timeline.compute_s))


def finished(task: Task, proposal: Proposal) -> Proposal:
    """The proposal, or a faster form of it. Some passes always have a budget (``budget_for``)."""
    budget = budget_for(proposal, task.budget.part(JOINED_SHARE) if is_joined(proposal) else task.budget)
    if proposal.program.key not in task.summed:
        proposal = REDUCTIONS(task, proposal, budget)
    return arranged(task, proposal, budget)


def arranged(task: Task, proposal: Proposal, budget: Budget) -> Proposal:
    """The proposal after the arranging passes, with its gradients reduced in the best way."""
    for improve in ARRANGING:
        proposal = improve(task, proposal, budget)
    return proposal
