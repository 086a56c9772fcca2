"""Chooses how gradients are reduced, on all ranks or to owners, if the simulator says that it matters.

On GPUs owners are tried for a run of the buckets. On CPUs all buckets are reduced in the same way: on gloo,
mixtures were slower than simulated (``python -m benchmarks sync``).
"""

from __future__ import annotations

from dataclasses import replace

from ...lang.ir import Program
from ...passes.buckets import with_buckets
from ...passes.sync import best_run, best_sync
from ...passes.zero import zero_stage
from ..budget import CARE_STEPS, SOME_STEPS, Budget
from ..proposal import Proposal
from ..task import Task
from .row import Pass

# smallest share of the step that is worth trying: exposed gradient sums, and the part of the optimizer that
# owners save
EXPOSED, SHORT_EXPOSED = 0.015, 0.05  # the latter if the budget does not pay for a thorough examination
# smallest share of the step to save: owners restrict optimizers to elementwise ones
MARGIN = 0.01
SMALL_BYTES = 1e6
RUN_BYTES = (4e6, 16e6)  # sizes of buckets, some of which get owners
TRIED, SHORT_TRIED = 40, 6  # runs of buckets of each size


def synced(task: Task, proposal: Proposal, budget: Budget) -> Proposal:
    """The proposal with its gradients summed in the fastest way, to owners or on all ranks."""
    best, program, simulation = proposal, proposal.program, proposal.simulation
    with task.timed("sync"):
        floor_s, _ = simulation.least_s(program)
    step_s = best.timeline.step_s
    exposed = step_s - floor_s + max(simulation.sheet.optimizer_s(program))
    size = len(program.instructions)
    is_short = not budget.pays_for(CARE_STEPS, size)
    least = SHORT_EXPOSED if is_short else EXPOSED
    on_cpu = any(d.kind == "cpu" for d in task.costs.cluster.devices)
    is_paid_for = not is_short or (budget.pays_for(SOME_STEPS, size) and not on_cpu)
    if zero_stage(program) or exposed < least * step_s or not is_paid_for:
        return best

    if on_cpu:
        # parameters gathered in small pieces arrive in time for the first layers while the others still
        # travel
        programs = [best_sync(with_buckets(program, SMALL_BYTES), task.costs, task.step_s, mixed=False)]
    else:
        programs = owned_runs(task, program, budget)
    for program in programs:
        most_s = min(best.timeline.step_s, step_s * (1 - MARGIN))
        # only ``finalists`` needs the memory of slower ones
        if task.kinds is None and task.step_s(program) >= most_s:
            continue
        candidate = task.judge(proposal.planner, program)
        if candidate.feasible and candidate.timeline.step_s < most_s:
            best = replace(candidate, gap=proposal.gap)
    return best


def owned_runs(task: Task, program: Program, budget: Budget) -> list[Program]:
    """Programs with owners for a run of the buckets of ``program``, which has none, for several sizes of
    buckets."""
    is_short = not budget.pays_for(CARE_STEPS, len(program.instructions))
    most = SHORT_TRIED if is_short else TRIED
    bucketed = [with_buckets(program, size) for size in RUN_BYTES]
    if not is_short and all(max_number(program) > max_number(each) for each in bucketed):
        bucketed.append(program)
    return [best_run(each, task.costs, task.step_s, most) for each in bucketed]


def max_number(program: Program) -> int:
    return max((number for number in program.buckets if number is not None), default=0)


REDUCTIONS = Pass(
    "reductions",
    "gradients all-reduced, or reduced to shard owners, whichever is faster for each bucket",
    lambda task, proposal, budget: synced(task, proposal, budget),
)
