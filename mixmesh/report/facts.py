"""All that a report shows of a plan: the same simulation that chose it, and data parallelism beside it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..api import simulate
from ..cluster import Cluster, with_faster_links
from ..cost import CostModel, Profile
from ..errors import Infeasible
from ..explain.headline import samples_per_rank
from ..ir import print_program
from ..plan_file import Plan
from ..planner import make_plan
from ..simulator import simulate as run
from ..timeline import Event, Timeline
from .path import critical_path

EVENLY = "ddp-even"
FASTER_LINKS = 2
COMMENT = re.compile(r"\s+#.*$")
SOURCE = re.compile(r"#.*?(\S+:\d+)\s*$")
RESULT = re.compile(r"\s*%([^\s,=]+)")


@dataclass(frozen=True)
class Parts:
    """The parts that a step is the sum of: computing at its best (``ideal_s``), what the busiest device takes
    longer than that, and what is waited for that no computing hides."""

    ideal_s: float
    imbalance_s: float
    exposed_s: float

    @classmethod
    def of(cls, timeline: Timeline, ideal_s: float) -> Parts:
        busiest_s = max(timeline.compute_s)
        ideal_s = min(ideal_s, busiest_s)
        return cls(ideal_s, busiest_s - ideal_s, max(timeline.step_s - busiest_s, 0.0))

    @property
    def step_s(self) -> float:
        return self.ideal_s + self.imbalance_s + self.exposed_s


@dataclass(frozen=True)
class Line:
    """A line of the program: its text, the user's line that it comes from, the name of its result, and the
    seconds of its events on the slowest rank."""

    text: str
    source: str
    name: str
    time_s: float


@dataclass(frozen=True)
class Facts:
    """All that is on the page. ``evenly`` is data parallelism with equal parts, None where it does not fit;
    ``faster_s`` the step of the same program with links twice as fast, None for one device."""

    plan: Plan
    cluster: Cluster
    timeline: Timeline
    critical: tuple[int, ...]
    samples: tuple[int, ...]
    parts: Parts
    evenly: Timeline | None
    evenly_parts: Parts | None
    faster_s: float | None
    lines: tuple[Line, ...]
    measured: Timeline | None = None


def facts_of(
    plan: Plan, cluster: Cluster, *, profile: Profile | None = None, measured: Timeline | None = None
) -> Facts:
    """Raises PlanError for a plan of another cluster."""
    timeline = simulate(plan, cluster, profile=profile, events=True)
    ideal_s = plan.bound_s or sum(timeline.compute_s) / len(timeline.compute_s)
    evenly = even_step(plan, cluster, profile)
    faster_s = None
    if cluster.world_size > 1:
        faster = with_faster_links(cluster, inside=FASTER_LINKS, between=FASTER_LINKS)
        costs = CostModel(faster, None if profile is None else profile.without_links())
        faster_s = run(plan.program, costs, micro_batches=plan.micro_batches).step_s
        if profile is not None:  # what links bring, by the same costs of links
            now = CostModel(cluster, profile.without_links())
            now_s = run(plan.program, now, micro_batches=plan.micro_batches).step_s
            faster_s *= timeline.step_s / now_s
    return Facts(
        plan,
        cluster,
        timeline,
        tuple(critical_path(timeline.events)),
        samples_per_rank(plan),
        Parts.of(timeline, ideal_s),
        evenly,
        None if evenly is None else Parts.of(evenly, ideal_s),
        faster_s,
        tuple(program_lines(plan, timeline.events)),
        measured,
    )


def even_step(plan: Plan, cluster: Cluster, profile: Profile | None) -> Timeline | None:
    """A step of data parallelism with equal parts on all devices; None where it does not fit."""
    try:
        made = make_plan(plan.program.graph, cluster, planner=EVENLY, profile=profile)
    except Infeasible:
        return None
    return run(made.program, CostModel(cluster, profile), micro_batches=made.micro_batches)


def program_lines(plan: Plan, events: Sequence[Event]) -> list[Line]:
    """The lines of the program's text with what each takes."""
    taken: dict[tuple[str, int], float] = defaultdict(float)
    for event in events:
        taken[event.name.partition(" ")[0], event.rank] += event.end_s - event.start_s
    slowest: dict[str, float] = defaultdict(float)
    for (name, _), time_s in taken.items():
        slowest[name] = max(slowest[name], time_s)
    lines = []
    for text in print_program(plan.program, plan.notes).splitlines():
        source, result = SOURCE.search(text), RESULT.match(text)
        name = result[1] if result else ""
        lines.append(Line(COMMENT.sub("", text), source[1] if source else "", name, slowest.get(name, 0.0)))
    return lines
