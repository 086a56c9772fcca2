"""Describes a plan as a whole: the work of each rank, and the communication between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..base.units import seconds_text, size_text
from ..cluster import Cluster
from ..cost import CostModel, Profile
from ..cost.calls import is_computation
from ..lang.check import check_plan
from ..lang.ir import (
    Instruction,
    Program,
    beside_points,
    local_bytes,
    regions,
    shard_sizes,
    stages_of,
    support,
    wgrad_of,
)
from ..lang.plan_file import Plan
from ..passes.zero import zero_stage
from ..search.placement.lift import operator_name, ratios_of
from ..search.placement.sets import is_joined, members_of
from ..search.placement.split import split
from .changes import collectives
from .explanation import SAME
from .headline import batch_size, samples_per_rank
from .judge import Judge
from .summary import kinds

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Ranks that compute the same operators: all ranks, those of a machine or a stage, or those under a
    ratio.

    ``samples`` has one entry for each of ``ranks``, out of the whole batch; for a machine each entry is the
    number of the whole machine, because its own program cuts the samples. ``placements`` counts the
    parameters of each placement; ``params`` are the first and the last. ``parameter_bytes`` is the most that
    a rank stores.
    """

    name: str
    ranks: Ranks
    samples: tuple[int, ...]
    num_operators: int
    placements: dict[str, int]
    params: tuple[str, ...]
    parameter_bytes: int


@dataclass(frozen=True)
class Overview:
    """A plan in words. ``kind`` is ``one program``, ``machines``, ``stages`` or ``groups``. ``exchanged``
    lists the collectives of a step by kind, in words, with their seconds. ``sentences`` name special
    features, and the next best plans."""

    kind: str
    units: tuple[Unit, ...]
    exchanged: tuple[tuple[str, float], ...]
    step_s: float
    compute_s: tuple[float, ...]
    sentences: tuple[str, ...]


def explain_plan(plan: Plan, cluster: Cluster, *, profile: Profile | None = None) -> Overview:
    """Describes a plan. Raises PlanError for a plan of another cluster."""
    check_plan(plan, cluster)
    costs = CostModel(cluster, profile, tf32=plan.tf32)
    kind = kind_of(plan)
    timeline = Judge(plan, costs).planned().proposal.timeline
    return Overview(
        kind,
        tuple(UNITS[kind](plan)),
        tuple(kinds(collectives(plan.program, costs))),
        timeline.step_s,
        timeline.compute_s,
        (HOW[kind], *_sentences(plan)),
    )


def kind_of(plan: Plan) -> str:
    if is_joined(plan.program):
        return "machines"
    if plan.order is not None:
        return "stages"
    return "groups" if len(set(ratios_of(plan.program).values())) > 1 else "one program"


HOW = {
    "one program": "All ranks run one program; samples and tensors are cut by one ratio.",
    "machines": "Samples are dealt out between machines, each of which runs a program of its own; between "
    "them gradients are summed.",
    "stages": "Samples go through stages one after the other, in micro-batches.",
    "groups": "Operators run under several ratios; between these values move.",
}


def _whole(plan: Plan) -> Iterator[Unit]:
    program = plan.program
    ratio = next(iter((*ratios_of(program).values(), *(r for _, r in program.ratios))), None)
    ranks = tuple(r for r in range(program.world_size) if ratio is None or ratio[r])
    operators = [i for i in program.instructions if is_computation(i)]
    size, cut = batch_size(program), samples_per_rank(plan)
    samples = tuple(cut[r] for r in ranks) if size else ()
    yield _unit("all" if len(ranks) == program.world_size else "in use", program, ranks, samples, operators)


def _machines(plan: Plan) -> Iterator[Unit]:
    sets, wholes = split(plan.program)
    for member, s in zip(members_of(plan.program), sets):
        sizes = [s.part.cuts[name].size for name in wholes if name in s.part.cuts]
        operators = [i for i in s.program.instructions if is_computation(i)]
        samples = (sizes[0],) * len(s.ranks) if sizes else ()
        yield _unit(str(member), s.program, s.ranks, samples, operators)


def _stages(plan: Plan) -> Iterator[Unit]:
    program, micro_batches = plan.program, plan.micro_batches or ()
    ratios = ratios_of(program)
    for n, ranks in enumerate(stages_of(program)):
        names = {name for name, ratio in ratios.items() if support(ratio) == ranks}
        operators = [i for i in program.instructions if is_computation(i) and operator_name(i) in names]
        samples = tuple(sum(micro_batches[r].sizes) for r in ranks)
        yield _unit(f"stage {n}", program, ranks, samples, operators)


def _groups(plan: Plan) -> Iterator[Unit]:
    program, ratios = plan.program, ratios_of(plan.program)
    batch = batch_size(program)
    for ratio in dict.fromkeys(ratios.values()):
        name = next(n for n, r in program.ratios if r == ratio)
        ranks = support(ratio)
        operators = [
            i for i in program.instructions if is_computation(i) and ratios.get(operator_name(i)) == ratio
        ]
        counts = shard_sizes(batch, ratio)
        yield _unit(name, program, ranks, tuple(counts[r] for r in ranks), operators)


UNITS: dict[str, Callable[[Plan], Iterator[Unit]]] = {
    "one program": _whole,
    "machines": _machines,
    "stages": _stages,
    "groups": _groups,
}


def _unit(
    name: str, program: Program, ranks: Ranks, samples: tuple[int, ...], operators: list[Instruction]
) -> Unit:
    """Describes the ranks that compute ``operators``. Their parameters are all that these use, also by way of
    redistributions."""
    source: dict[str, str] = {}
    for i in program.instructions:
        if i.op == "param":
            source[i.result] = i.result
        elif i.is_redistribution and i.inputs[0] in source:
            source[i.result] = source[i.inputs[0]]
    used = dict.fromkeys(source[name] for i in operators for name in i.inputs if name in source)
    params = [program.producers[name] for name in used]
    stored = (
        sum(local_bytes(i.type.value, i.type.placement, program.ratio(i.type.ratio), rank) for i in params)
        for rank in ranks
    )
    paths = [str(i.args[0]) for i in params]
    return Unit(
        name,
        ranks,
        samples,
        len(operators),
        dict(Counter(str(i.type.placement) for i in params)),
        tuple(dict.fromkeys((*paths[:1], *paths[-1:]))),
        max(stored, default=0),
    )


def _sentences(plan: Plan) -> Iterator[str]:
    yield from _about_sums(plan.program)
    yield from _about_passes(plan)
    yield from _about_weight_gradients(plan.program)
    if plan.bound_s:
        bound = seconds_text(plan.bound_s)
        yield (
            f"No plan can be faster than {bound}."
            if plan.is_bound_measured
            else f"At the peaks of the devices' figures no plan can be faster than {bound}."
        )
    yield from _about_others(plan)


def _about_sums(program: Program) -> Iterator[str]:
    if stage := zero_stage(program):
        yield f"Gradients and optimizer state have owners (ZeRO stage {stage})."
    if program.levels is not None:
        yield "Gradients are summed within machines first, then between them."
    if program.direct_bytes:
        size = size_text(program.direct_bytes)
        yield f"Values of up to {size} are summed in one shot: every rank sends to every other."


def _about_passes(plan: Plan) -> Iterator[str]:
    program, micro_batches = plan.program, plan.micro_batches or ()
    most = max((m.steps for m in micro_batches), default=0)
    if plan.order is not None:
        yield f"Micro-batches run in {plan.order} order: {most} of them."
    elif most > 1:
        steps = ", ".join(str(m.steps) for m in micro_batches)
        yield f"Ranks take their samples in {steps} micro-batches."
    if parts := regions(program):
        count, every = sum(map(len, parts.values())), sum(map(is_computation, program.instructions))
        yield f"The backward pass computes {count} of {every} operators again, in {len(parts)} regions."


def _about_weight_gradients(program: Program) -> Iterator[str]:
    if program.factored:
        yield f"{len(program.factored)} weight gradients are computed from gathered factors."
    beside = beside_points(program)
    apart = (n for n, i in enumerate(program.instructions) if wgrad_of(i) in ("first", "beside"))
    if count := sum(n not in beside for n in apart):
        yield f"{count} weight gradients are computed before those of their inputs."
    if count := sum(wgrad_of(i) == "last" for i in program.instructions):
        yield f"{count} weight gradients are computed after the rest of the backward pass."
    if beside:
        count = len({at.collective for at in beside.values()})
        yield f"{len(beside)} weight gradients are computed while {count} collectives travel back."


def _about_others(plan: Plan) -> Iterator[str]:
    others = [c for c in plan.candidates if c.planner != plan.planner]
    fitting = [c for c in others if c.feasible]
    if fitting:
        best = min(fitting, key=lambda c: c.predicted_step_s)
        more = best.predicted_step_s - plan.predicted_step_s
        how = f"a step of {seconds_text(more)} more" if more > SAME * plan.predicted_step_s else "as fast"
        yield f"The next best that fits is by {best.planner}: {how}."
    if len(fitting) < len(others):
        names = ", ".join(c.planner for c in others if not c.feasible)
        yield f"Nothing that fits was found by {names}."
