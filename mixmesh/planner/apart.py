"""Weight gradients of a plan that was found, computed before, after or beside what the backward pass waits
for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..lang.ir import Program, beside_points, separable, with_wgrads
from ..passes.zero import with_owners, zero_stage
from .synced import owned_runs
from .task import SMALL_INSTRUCTIONS, Proposal, Task

# share of the step that sums of gradients, or other waits, must take beyond what hides
EXPOSED, QUICK_EXPOSED = 0.01, 0.03
GAIN = 0.01  # share of the step that must be saved
SMALL_BYTES = 2**16  # a weight's, from which on its sum can matter
LASTS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)  # parts of the products that are used first, which are made last
QUICK_LASTS = (0.0, 0.1)
QUICK_INSTRUCTIONS = 2000  # in a program that there is time for


def apart(task: Task, proposal: Proposal, *, quick: bool = False) -> Proposal:
    """The proposal with weight gradients as early as they can be, or beside collectives of the backward pass,
    but for those of the first few layers, which are last; itself if that is no faster."""
    program, simulation = proposal.program, proposal.simulation
    step_s = proposal.timeline.step_s
    if quick and len(program.instructions) > QUICK_INSTRUCTIONS:
        return proposal
    least_s = (QUICK_EXPOSED if quick else EXPOSED) * step_s
    with task.timed("wgrad"):
        floor_s = simulation.least_s(program)[0]
        able, beside = [], frozenset()
        if step_s - floor_s >= least_s:
            able = [n for n in separable(program) if _is_summed(proposal, n)]
        if floor_s - max(proposal.timeline.compute_s) >= least_s:
            beside = hideable(task, proposal, least_s)
    if not able and not beside:
        return proposal
    hurried = quick and len(program.instructions) > SMALL_INSTRUCTIONS
    forms = {collectives: marked(program, able, collectives) for collectives in (frozenset(), beside)}
    if not able:
        del forms[frozenset()]
    if hurried:
        enough_s = step_s * (1 - GAIN)
        forms = {c: form for c, form in forms.items() if task.usual_s(proposal.planner, form) <= enough_s}
    tried = {task.best_buckets(proposal.planner, form): c for c, form in forms.items()}
    if not tried:
        return proposal
    best = min(tried, key=lambda p: p.key)
    if not hurried:
        counts = {round(part * len(able)) for part in (QUICK_LASTS if quick else LASTS)} - {0}
        programs = [marked(program, able, tried[best], count) for count in sorted(counts)]
        best = min([best, *(task.best_buckets(proposal.planner, p) for p in programs)], key=lambda p: p.key)
        if zero_stage(program) == 1:
            # sums that begin earlier leave other buckets to owners
            runs = owned_runs(task, with_owners(best.program, {}), quick=quick)
            best = min([best, *(task.judge(proposal.planner, p) for p in runs)], key=lambda p: p.key)
    if best.feasible and best.timeline.step_s < step_s * (1 - GAIN):
        return replace(best, gap=proposal.gap)
    return proposal


def marked(program: Program, able: Sequence[int], beside: Collection[int] = (), last: int = 0) -> Program:
    """``program`` in which the first few of the products that are ``able`` have their weight's gradient
    ``last``, those that can be computed ``beside`` a collective have it so, the others ``first``."""
    lasts = {*able[:last]}
    chosen = {n: "last" if n in lasts else "beside" if n in beside else "first" for n in (*able, *beside)}
    return with_wgrads(program, chosen)


def hideable(task: Task, proposal: Proposal, least_s: float) -> frozenset[int]:
    """The products that can be computed beside a collective of the backward pass; none if these collectives
    take less of the step."""
    program, exchanges = proposal.program, proposal.simulation.sheet.exchanges
    points = beside_points(with_wgrads(program, dict.fromkeys(separable(program), "beside")))
    collectives = dict.fromkeys(at.collective for at in points.values())
    seconds = sum(exchanges[name, True].seconds(task.costs) for name in collectives)
    return frozenset(points) if seconds >= least_s else frozenset()


def _is_summed(proposal: Proposal, n: int) -> bool:
    weight = proposal.program.instructions[n].inputs[1]
    size_bytes = proposal.program.types[weight].value.size_bytes
    return weight in proposal.simulation.step.ready.points and size_bytes >= SMALL_BYTES
