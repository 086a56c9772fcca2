"""Weight gradients of a plan that was found, computed before or after what the backward pass waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import Program, separable, with_wgrads
from ..zero import with_owners, zero_stage
from .synced import SMALL_INSTRUCTIONS, owned_runs
from .task import Proposal, Task

EXPOSED = 0.03  # of the step that sums of gradients must take, beyond what hides
GAIN = 0.01  # of the step that must be saved
SMALL_BYTES = 2**16  # a weight's, from which on its sum can matter
LASTS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)  # parts of the products that are used first, which are made last
QUICK_LASTS = (0.0, 0.1)
QUICK_INSTRUCTIONS = 1500  # of a program that there is time for


def apart(task: Task, proposal: Proposal, *, quick: bool = False) -> Proposal:
    """The proposal with weight gradients as early as they can be, but for those of the first few layers,
    which are last; itself if that is no faster."""
    program, simulation = proposal.program, proposal.simulation
    step_s = proposal.timeline.step_s
    if quick and len(program.instructions) > QUICK_INSTRUCTIONS:
        return proposal
    with task.timed("wgrad"):
        if step_s - simulation.least_s(program)[0] < EXPOSED * step_s:
            return proposal
        able = [n for n in separable(program) if _is_summed(proposal, n)]
    if not able:
        return proposal
    parts = QUICK_LASTS if quick else LASTS
    programs = [marked(program, able, round(part * len(able))) for part in parts]
    hurried = quick and len(program.instructions) > SMALL_INSTRUCTIONS
    if hurried and task.usual_s(proposal.planner, programs[0]) > step_s * (1 - GAIN):
        return proposal
    programs = programs[:1] if hurried else programs
    best = min((task.best_buckets(proposal.planner, p) for p in programs), key=lambda p: p.key)
    if zero_stage(program) == 1 and not hurried:
        # sums that begin earlier leave other buckets to owners
        runs = owned_runs(task, with_owners(best.program, {}), quick=quick)
        best = min([best, *(task.judge(proposal.planner, p) for p in runs)], key=lambda p: p.key)
    if best.feasible and best.timeline.step_s < step_s * (1 - GAIN):
        return replace(best, gap=proposal.gap)
    return proposal


def marked(program: Program, able: Sequence[int], last: int) -> Program:
    """``program`` in which the first few of these products have their weight's gradient ``last``, the others
    ``first``."""
    return with_wgrads(program, {n: "last" if k < last else "first" for k, n in enumerate(able)})


def _is_summed(proposal: Proposal, n: int) -> bool:
    weight = proposal.program.instructions[n].inputs[1]
    size_bytes = proposal.program.types[weight].value.size_bytes
    return weight in proposal.simulation.points and size_bytes >= SMALL_BYTES
