"""The other plans that were considered, each with the reason why it is slower, in words."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.timeline import Timeline
from ...base.units import seconds_text, size_text
from ...cluster import Cluster
from ...cluster.device import HEADROOM
from ...cost import CostModel, Profile
from ...errors import MixmeshError
from ...lang.plan_file import Candidate, Plan, accumulates
from ...planner import make_plan
from ...planner.planners import BY_NAME, When
from ...planner.proposal import BASELINES
from ...planner.task import Task
from ...search.placement.sets import is_joined
from ...search.ratios import usable_bytes
from ...simulator import Simulation
from .drawing import busiest_link, device_name
from .parts import OTHERS, WAITS, Bounds, Parts, kinds_of

EVENLY = "ddp-even"
LONG_S = 10.0  # seconds of planning beyond which only baselines are planned once more
SAME = 0.005  # share of a step: smaller differences are not reported
TOLD = 0.2  # share of a difference: smaller parts of it are not mentioned
WHOLE = 0.9  # share of a difference: a part this large is mentioned alone


@dataclass(frozen=True)
class Remade:
    """A candidate planned again, with all events of its step. If it does not fit, ``lacks`` is (rank, bytes
    needed, bytes usable)."""

    timeline: Timeline
    parts: Parts
    lacks: tuple[int, int, int] | None


@dataclass(frozen=True)
class Rival:
    """A candidate as the page shows it. ``remade`` is None if planning it again would take long."""

    planner: str
    fits: bool
    step_s: float
    remade: Remade | None
    why: str


def rivals_of(plan: Plan, cluster: Cluster, parts: Parts, profile: Profile | None) -> tuple[Rival, ...]:
    """The other candidates of ``plan``, and data parallelism with equal parts, sorted by whether they fit and
    by their steps. ``parts`` are those of the plan's own step."""
    considered = {c.planner: c for c in plan.candidates if c.planner != plan.planner}
    if plan.planner != EVENLY and cluster.world_size > 1:
        considered.setdefault(EVENLY, Candidate(EVENLY, True, 0.0))
    rivals = []
    for name, candidate in considered.items():
        remade = remake(plan, cluster, name, profile, parts.bounds) if is_quick(plan, name) else None
        step_s = remade.timeline.step_s if remade else candidate.predicted_step_s
        fits = remade.lacks is None if remade else candidate.feasible
        if remade is None and not step_s:
            continue
        why = why_not(step_s, fits, remade, parts, cluster)
        rivals.append(Rival(name, fits, step_s, remade, why))
    return tuple(sorted(rivals, key=lambda rival: (not rival.fits, rival.step_s)))


def is_quick(plan: Plan, name: str) -> bool:
    """Whether a candidate may be planned once more for a page: not from a program of two levels, which has
    the model once for every machine."""
    row = BY_NAME.get(name)
    if is_joined(plan.program) or row is None or row.asked in (When.IN_NEED, When.IN_A_SEARCH):
        return False
    return name in BASELINES or plan.planning_s < LONG_S


def remake(plan: Plan, cluster: Cluster, name: str, profile: Profile | None, bounds: Bounds) -> Remade | None:
    """The plan of one planner, even if it does not fit; None if it has none."""
    costs, graph = CostModel(cluster, profile, tf32=plan.tf32), plan.program.graph
    states = plan.optimizer_states
    try:
        remade = make_plan(
            graph, cluster, planner=name, profile=profile, tf32=plan.tf32, optimizer_states=states
        )
        program, micro_batches = remade.program, remade.micro_batches
    except MixmeshError:  # it does not fit: take its proposal anyway
        proposals = list(BY_NAME[name].propose(Task(graph, costs, states, lambda _: None)))
        if not proposals:
            return None
        least = min(proposals, key=lambda p: p.key)
        program, micro_batches = least.program, least.micro_batches
    simulation = Simulation(program, costs, states, accumulating=accumulates(micro_batches))
    timeline = simulation.run(program, micro_batches, events=True)
    usable = [usable_bytes(costs, rank, HEADROOM) for rank in range(cluster.world_size)]
    over = [(peak - usable[r], r) for r, peak in enumerate(timeline.peak_memory_bytes)]
    most, rank = max(over)
    lacks = (rank, timeline.peak_memory_bytes[rank], round(usable[rank])) if most > 0 else None
    return Remade(timeline, Parts.of(timeline, bounds, kinds_of(program)), lacks)


def why_not(step_s: float, fits: bool, remade: Remade | None, best: Parts, cluster: Cluster) -> str:
    """The reason why a candidate was not chosen: ``320 ms more, 280 ms of them in gathers of parameters that
    no computing hides on the 1 Gbit/s link of machine b; and rank 3 would need 17 GiB and may use 15.2
    GiB``."""
    more_s = step_s - best.step_s
    if abs(more_s) <= SAME * best.step_s:
        text = "as fast as the plan"
    else:
        text = f"{seconds_text(abs(more_s))} {'more' if more_s > 0 else 'less'}"
    if remade is None:
        return text + ("" if fits else "; it does not fit in memory")
    if more_s > SAME * best.step_s:
        text += why_slower(more_s, remade, best, cluster)
    if remade.lacks is not None:
        rank, needed, usable = remade.lacks
        joined = "; and" if more_s > 0 else "; but"
        needs = f"would need {size_text(needed)} and may use {size_text(usable)}"
        text += f"{joined} {device_name(cluster, rank)} {needs}"
    return text


def why_slower(more_s: float, remade: Remade, best: Parts, cluster: Cluster) -> str:
    """The parts of a step that account for most of a difference, in words that follow its seconds."""
    parts = remade.parts
    name, whole_s = device_name(cluster, parts.busiest), remade.timeline.compute_s[parts.busiest]
    reasons = [(parts.busy_s - best.busy_s, f"as {name} computes for {seconds_text(whole_s)}")]
    for mine_s, ours_s, kind in zip(parts.waits_s, best.waits_s, WAITS):
        hidden = f"in {kind} that no computing hides"
        text = f"in which {name} waits for other devices" if kind == OTHERS else hidden
        reasons.append((mine_s - ours_s, text))
    told = sorted((r for r in reasons if r[0] >= TOLD * more_s), reverse=True)
    if not told:
        return ", in many small parts"
    link = busiest_link(cluster, remade.timeline)
    where = f" on the {link}" if link and any("hides" in text for _, text in told) else ""
    if len(told) == 1 and told[0][0] >= WHOLE * more_s:
        return f", {told[0][1]}{where}"
    listed = (f", {seconds_text(part_s)} of them {text}" for part_s, text in told if part_s <= more_s)
    return "".join(listed) + where
