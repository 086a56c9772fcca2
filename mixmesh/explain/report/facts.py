"""The content of a report on a plan: the simulation that chose it, and the other candidates."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ...base.timeline import Event, Timeline
from ...cluster import Cluster, with_faster_links
from ...cost import CostModel, Profile
from ...errors import InputError
from ...lang.check import check_loaded, check_plan
from ...lang.ir import print_program
from ...lang.plan_file import Plan, accumulates, is_measured
from ...planner import make_plan
from ...planner.task import Task
from ...search.placement.sets import is_joined
from ...simulator import Simulation
from ...simulator import simulate as run
from ...simulator.memory import MemoryCourse, memory_courses
from ..headline import batch_size, samples_per_rank
from ..whatif import Answer, Change, answers, changes
from .candidates import EVENLY, Rival, rivals_of
from .parts import Bounds, KindOf, Parts, kinds_of
from .path import critical_path

FASTER_LINKS = 2
COMMENT = re.compile(r"\s+#.*$")
SOURCE = re.compile(r"#.*?(\S+:\d+)\s*$")
RESULT = re.compile(r"\s*%([^\s,=]+)")


@dataclass(frozen=True)
class Line:
    """A line of the program: its text, the user's line that it comes from, the name of its result, and the
    seconds of its events on the slowest rank."""

    text: str
    source: str
    name: str
    time_s: float


@dataclass(frozen=True)
class WhatIf:
    """The step on the unchanged cluster and after each change, and the seconds that the answers took."""

    answers: tuple[Answer, ...]
    took_s: float


@dataclass(frozen=True)
class Facts:
    """The content of the page of one plan. ``name`` distinguishes it from other plans on the page. ``memory``
    has an entry per rank. ``faster_s`` is the step of the same program with links twice as fast, None for one
    device; ``rivals`` are the other candidates, empty if nothing is compared."""

    name: str
    plan: Plan
    cluster: Cluster
    timeline: Timeline
    kind_of: KindOf
    critical: tuple[int, ...]
    samples: tuple[int, ...]
    parts: Parts
    memory: tuple[MemoryCourse, ...]
    rivals: tuple[Rival, ...]
    faster_s: float | None
    lines: tuple[Line, ...]
    measured: Timeline | None = None
    what_if: WhatIf | None = None

    @property
    def evenly(self) -> Rival | None:
        """Data parallelism with equal parts on all devices; None if the plan is not compared with it."""
        return next((rival for rival in self.rivals if rival.planner == EVENLY), None)


def facts_of(
    plan: Plan,
    cluster: Cluster,
    *,
    profile: Profile | None = None,
    measured: Timeline | None = None,
    name: str = "",
    is_compared: bool = True,
    asks_what_if: bool = False,
) -> Facts:
    """The facts of ``plan``, with its candidates if it ``is_compared``. Raises PlanError for a plan of
    another cluster, VerificationError for an edited plan that is not valid."""
    if plan.edited:
        check_loaded(plan)
    check_plan(plan, cluster)
    costs = CostModel(cluster, profile, tf32=plan.tf32)
    simulation = Simulation(
        plan.program, costs, plan.optimizer_states, accumulating=accumulates(plan.micro_batches)
    )
    bounds = bounds_of(plan, costs)
    timeline = simulation.promised(plan.program, plan.micro_batches, plan.usable_bytes, events=True)
    held = simulation.held_bytes(plan.program, plan.micro_batches)
    kind_of = kinds_of(plan.program)
    parts = Parts.of(timeline, bounds, kind_of)
    return Facts(
        name or plan.planner,
        plan,
        cluster,
        timeline,
        kind_of,
        tuple(critical_path(timeline.events)),
        samples_per_rank(plan),
        parts,
        memory_courses(held, timeline),
        rivals_of(plan, cluster, parts, profile) if is_compared else (),
        with_faster(plan, cluster, profile, timeline.step_s),
        tuple(program_lines(plan, timeline.events)),
        measured,
        what_if(plan, cluster, profile) if asks_what_if else None,
    )


def bounds_of(plan: Plan, costs: CostModel) -> Bounds:
    """The bounds that the plan keeps, or those under ``costs`` if it was planned with others."""
    if plan.cost_source == costs.source and plan.bound_s is not None and plan.ideal_s is not None:
        return Bounds(plan.bound_s, plan.ideal_s, plan.is_bound_measured)
    task = Task(plan.program.graph, costs, plan.optimizer_states, lambda _: None)
    return Bounds(task.bound_s, task.ideal_s, is_measured(costs.source))


def with_faster(plan: Plan, cluster: Cluster, profile: Profile | None, step_s: float) -> float | None:
    """The step of the same program with links ``FASTER_LINKS`` times as fast; None for one device."""
    if cluster.world_size == 1:
        return None
    faster = with_faster_links(cluster, inside=FASTER_LINKS, between=FASTER_LINKS)
    costs = CostModel(faster, None if profile is None else profile.without_links(), tf32=plan.tf32)
    faster_s = run(plan.program, costs, micro_batches=plan.micro_batches).step_s
    if profile is not None:  # the same costs of links give the gain of faster links
        now = CostModel(cluster, profile.without_links(), tf32=plan.tf32)
        faster_s *= step_s / run(plan.program, now, micro_batches=plan.micro_batches).step_s
    return faster_s


def what_if(plan: Plan, cluster: Cluster, profile: Profile | None) -> WhatIf:
    """Answers what-ifs for the program's own batch only, because a plan does not have the model. Raises
    InputError for a plan of two levels, whose program has the model once for every machine."""
    if is_joined(plan.program):
        raise InputError(
            "what-ifs need the model, and a plan of two levels holds a part of it for every machine",
            got=f"a plan by {plan.planner}",
            hint="mixmesh what-if JOB --cluster C.toml",
        )
    started = time.perf_counter()
    asked = [change for change in changes(cluster) if change.batches == 1]
    what_ifs = answers(
        Change("now", "as it is", cluster),
        asked,
        lambda _: plan.program.graph,
        batch_size(plan.program) or 1,
        lambda graph, changed, costs: make_plan(
            graph, changed, profile=costs, optimizer_states=plan.optimizer_states
        ),
        profile,
    )
    return WhatIf(tuple(what_ifs), time.perf_counter() - started)


def program_lines(plan: Plan, events: Sequence[Event]) -> list[Line]:
    """The lines of the program's text, each with its seconds."""
    seconds_of: dict[tuple[str, int], float] = defaultdict(float)
    for event in events:
        seconds_of[event.name.partition(" ")[0], event.rank] += event.end_s - event.start_s
    slowest: dict[str, float] = defaultdict(float)
    for (name, _), time_s in seconds_of.items():
        slowest[name] = max(slowest[name], time_s)
    lines = []
    for text in print_program(plan.program, plan.notes).splitlines():
        source, result = SOURCE.search(text), RESULT.match(text)
        name = result[1] if result else ""
        lines.append(Line(COMMENT.sub("", text), source[1] if source else "", name, slowest.get(name, 0.0)))
    return lines
