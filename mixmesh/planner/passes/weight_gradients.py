"""Moves weight gradients of a plan to earlier or later points of its backward pass, or into its waits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ...lang.ir import Program, beside_points, separable, with_wgrads
from ...passes.zero import with_owners, zero_stage
from ..budget import CARE_STEPS, SOME_STEPS, Budget
from ..proposal import Proposal
from ..task import Task
from .reductions import owned_runs
from .row import Pass

# smallest share of the step that is worth trying, in exposed gradient sums or other waits
EXPOSED, SHORT_EXPOSED = 0.01, 0.015  # the latter if the budget does not pay for a thorough examination
GAIN = 0.01  # share of the step that must be saved
SMALL_BYTES = 2**16  # smaller weights have sums that do not matter
LASTS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)  # shares of the products that come last, which are those used first


def apart(task: Task, proposal: Proposal, budget: Budget) -> Proposal:
    """The proposal with weight gradients as early as possible or overlapped with collectives of the backward
    pass, except for those of the first few layers, which come last; unchanged if that is no faster."""
    program, step_s = proposal.program, proposal.timeline.step_s
    size = len(program.instructions)
    if not budget.pays_for(SOME_STEPS, size):
        return proposal
    is_short = not budget.pays_for(CARE_STEPS, size)
    able, beside = movable(task, proposal, (SHORT_EXPOSED if is_short else EXPOSED) * step_s)
    tried = {
        task.best_buckets(proposal.planner, form): collectives
        for form, collectives in forms(task, proposal, able, beside, is_short)
    }
    if not tried:
        return proposal
    best = min(tried, key=lambda p: p.key)
    if not is_short:
        programs = [marked(program, able, tried[best], count) for count in counts(able)]
        best = refined(task, best, programs, budget)
    if best.feasible and best.timeline.step_s < step_s * (1 - GAIN):
        return replace(best, gap=proposal.gap)
    return proposal


def movable(task: Task, proposal: Proposal, least_s: float) -> tuple[Sequence[int], frozenset[int]]:
    """The products whose weight gradients may come first or last (none unless reductions are exposed for
    ``least_s``), and those whose weight gradients may overlap a collective (none unless the backward pass
    waits that long for collectives)."""
    program = proposal.program
    with task.timed("wgrad"):
        floor_s = proposal.simulation.least_s(program)[0]
        able: list[int] = []
        if proposal.timeline.step_s - floor_s >= least_s:
            able = [n for n in separable(program) if _is_summed(proposal, n)]
        if floor_s - max(proposal.timeline.compute_s) < least_s:
            return able, frozenset()
        return able, hideable(task, proposal, least_s)


def forms(
    task: Task, proposal: Proposal, able: Sequence[int], beside: frozenset[int], is_short: bool
) -> list[tuple[Program, frozenset[int]]]:
    """The program with the weight gradients of all ``able`` products first, with and without those in
    ``beside`` overlapping collectives. If the budget ``is_short``, only the forms that are faster in usual
    buckets."""
    program = proposal.program
    choices = dict.fromkeys([frozenset[int](), beside] if able else [beside] if beside else [])
    programs = [(marked(program, able, collectives), collectives) for collectives in choices]
    if not is_short:
        return programs
    enough_s = proposal.timeline.step_s * (1 - GAIN)
    return [(form, c) for form, c in programs if task.usual_s(proposal.planner, form) <= enough_s]


def counts(able: Sequence[int]) -> list[int]:
    """The numbers of products to try as ``last``, among those that are used first."""
    return sorted({round(part * len(able)) for part in LASTS} - {0})


def refined(task: Task, best: Proposal, programs: Sequence[Program], budget: Budget) -> Proposal:
    """The fastest of a proposal, other forms of its program, and other choices of the buckets reduced to
    owners, if it has any: reductions that begin earlier leave other buckets to owners."""
    best = min([best, *(task.best_buckets(best.planner, p) for p in programs)], key=lambda p: p.key)
    if zero_stage(best.program) != 1:
        return best
    runs = owned_runs(task, with_owners(best.program, {}), budget)
    return min([best, *(task.judge(best.planner, p) for p in runs)], key=lambda p: p.key)


def marked(program: Program, able: Sequence[int], beside: Collection[int] = (), last: int = 0) -> Program:
    """``program`` with weight gradients marked: of the ``able`` products the first few (``last`` of them)
    come ``last``; those in ``beside`` overlap a collective; the others come ``first``."""
    lasts = {*able[:last]}
    chosen = {n: "last" if n in lasts else "beside" if n in beside else "first" for n in (*able, *beside)}
    return with_wgrads(program, chosen)


def hideable(task: Task, proposal: Proposal, least_s: float) -> frozenset[int]:
    """The products whose weight gradients can overlap a collective of the backward pass; none if these
    collectives take less than ``least_s``."""
    program, exchanges = proposal.program, proposal.simulation.sheet.exchanges
    points = beside_points(with_wgrads(program, dict.fromkeys(separable(program), "beside")))
    collectives = dict.fromkeys(at.collective for at in points.values())
    seconds = sum(e.seconds(task.costs) for name in collectives if (e := exchanges[name, True]) is not None)
    return frozenset(points) if seconds >= least_s else frozenset()


def _is_summed(proposal: Proposal, n: int) -> bool:
    weight = proposal.program.instructions[n].inputs[1]
    size_bytes = proposal.program.types[weight].value.size_bytes
    return weight in proposal.simulation.step.ready.points and size_bytes >= SMALL_BYTES


WEIGHT_GRADIENTS = Pass(
    "weight gradients",
    "weight gradients first, last, or overlapped with collectives of the backward pass",
    lambda task, proposal, budget: apart(task, proposal, budget),
)
