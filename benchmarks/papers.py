"""Simulated steps compared with published ones: HAP's figure 12.

Links are taken from two sources, with nothing fitted to the results: ``wire``, where collectives run at the
published 10.4 Gbit/s, and ``measured``, the rates that HAP's authors measured for NCCL on it, sends included.
Devices are rooflines from their datasheets. No case has settings of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from mixmesh.cluster import Cluster
from mixmesh.cost import CollectiveFit, CostModel, Profile, measurement_of_fit
from mixmesh.cost.collectives import ring_fit
from mixmesh.errors import Infeasible, InputError
from mixmesh.frontend.job.workloads import make
from mixmesh.frontend.trace import trace
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.planner import make_plan
from mixmesh.planner.hap import DDP_TUNED
from mixmesh.planner.proposal import BASELINES
from mixmesh.planner.task import Task

from .bars import least, machine_alone_s
from .published import GPUS, HAP_COLLECTIVE_BYTES_PER_S, HAP_FIGURE_12, HAP_FIGURE_14, Published
from .revision import revision

LINKS = ("wire", "measured")
TOLERANCE = 0.25  # share of a published time: rows that differ more are marked
QUICK_GPUS = (8,)
MACHINE_ALONE = "one machine"
ANY_SIZE_BYTES = (2**12, 2**40)  # HAP gives one bandwidth for all sizes


@dataclass(frozen=True)
class Row:
    """One model on one cluster, in seconds per iteration; None if unknown or if nothing fits."""

    workload: str
    gpus: int
    links: str
    global_batch: int
    ddp_even_s: float | None
    ddp_proportional_s: float | None
    fsdp_even_s: float | None
    single_s: float | None  # the fastest single device
    machine_alone_s: float | None  # the best data parallelism on a single machine
    # data parallelism done well: with our sums, shares and choice of devices, but without a search
    ddp_tuned_s: float | None
    best_s: float | None
    best_planner: str | None
    does_not_fit: tuple[str, ...]
    published_ddp_even_s: float | None
    published_ddp_proportional_s: float | None
    published_hap_s: float | None
    ddp_even_ratio: float | None
    ddp_proportional_ratio: float | None
    best_ratio: float | None
    bound_s: float | None  # all devices compute all the time at the peaks of their datasheets
    baseline: str | None  # the fastest that a user would write by hand
    speedup: float | None  # the best plan over that baseline
    over_data_parallel: float | None  # over the better of DP-EV and DP-CP, as in HAP's own figure
    over_tuned: float | None
    most: float | None  # the largest speed-up over the baseline that any plan could have
    published_speedup: float | None
    planning_s: float
    claim: str

    @property
    def differs(self) -> tuple[str, ...]:
        """Baselines further than ``TOLERANCE`` from the published time."""
        ratios = {"ddp-even": self.ddp_even_ratio, "ddp-proportional": self.ddp_proportional_ratio}
        return tuple(name for name, r in ratios.items() if r is not None and abs(r - 1) > TOLERANCE)


def cases(workloads: Sequence[str] = (), gpus: Sequence[int] = ()) -> tuple[tuple[Published, int], ...]:
    """The published cases that can be run, small first. Raises InputError for one that is not in the
    figure."""
    known = [p.workload for p in HAP_FIGURE_12]
    for name in workloads:
        if name not in known:
            raise InputError(f"no published times of {name!r}", expected=", ".join(known), got=name)
    for count in gpus:
        if count not in GPUS:
            raise InputError(
                f"no published times on {count} devices", expected=", ".join(map(str, GPUS)), got=str(count)
            )
    return tuple((p, n) for p in HAP_FIGURE_12 if p.workload in (workloads or known) for n in (gpus or GPUS))


def run(
    chosen: Sequence[tuple[Published, int]], progress: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """A row per case and source of link figures."""
    for published, gpus in chosen:
        batch = published.batch_per_gpu * gpus
        progress(f"{published.workload} on {gpus}: tracing")
        job = make(f"{published.workload}:{batch}")
        traced = trace(job.model, job.batch)
        cluster = Cluster.load(f"hap-{gpus}")
        for links in LINKS:
            progress(f"{published.workload} on {gpus}, {links} links: planning")
            profile = measured_links(cluster) if links == "measured" else None
            yield plan_case(published, gpus, links, traced, cluster, profile)


def measured_links(cluster: Cluster) -> Profile:
    """The bandwidths that HAP measured, with the latencies of the cluster file."""
    everyone = tuple(range(cluster.world_size))
    fits = (
        (name, CollectiveFit(ring_fit(cluster, name, everyone).latency_s, 1 / rate))
        for name, rate in HAP_COLLECTIVE_BYTES_PER_S.items()
    )
    return Profile({}, tuple(measurement_of_fit(name, fit, ANY_SIZE_BYTES, "HAP") for name, fit in fits))


def plan_case(
    published: Published, gpus: int, links: str, traced, cluster: Cluster, profile: Profile | None
) -> Row:
    started = time.perf_counter()
    try:
        plan = make_plan(traced, cluster, profile=profile, optimizer_states=ADAM)
        best, planner, candidates = plan.predicted_step_s, plan.planner, plan.candidates
        bound_s = plan.bound_s
    except Infeasible:
        best, planner, candidates, bound_s = None, None, (), None
    planning_s = time.perf_counter() - started
    tuned_s = tuned_alone_s(traced, cluster, profile)
    step_s = {c.planner: c.predicted_step_s for c in candidates if c.feasible}
    column = GPUS.index(gpus)

    def bar(values: tuple[float, ...]) -> float | None:
        return values[column] if values else None

    even, proportional, single = (step_s.get(n) for n in ("ddp-even", "ddp-proportional", "single"))
    alone_s = machine_alone_s(traced.graph, cluster, ADAM)
    by_hand = {**{name: step_s[name] for name in BASELINES if name in step_s}, MACHINE_ALONE: alone_s}
    by_hand = {name: seconds for name, seconds in by_hand.items() if seconds}
    baseline = min(by_hand, key=by_hand.__getitem__, default=None)
    bar_s = None if baseline is None else by_hand[baseline]
    told = bar(published.ddp_even), bar(published.ddp_proportional), bar(published.hap)
    return Row(
        workload=published.workload,
        gpus=gpus,
        links=links,
        global_batch=published.batch_per_gpu * gpus,
        ddp_even_s=even,
        ddp_proportional_s=proportional,
        fsdp_even_s=step_s.get("fsdp-even"),
        single_s=single,
        machine_alone_s=alone_s,
        ddp_tuned_s=tuned_s,
        best_s=best,
        best_planner=planner,
        does_not_fit=tuple(c.planner for c in candidates if not c.feasible),
        published_ddp_even_s=told[0],
        published_ddp_proportional_s=told[1],
        published_hap_s=told[2],
        ddp_even_ratio=_ratio(even, told[0]),
        ddp_proportional_ratio=_ratio(proportional, told[1]),
        best_ratio=_ratio(best, told[2]),
        bound_s=bound_s,
        baseline=baseline,
        speedup=_ratio(bar_s, best),
        over_data_parallel=_ratio(least(even, proportional), best),
        over_tuned=_ratio(tuned_s, best),
        most=_ratio(bar_s, bound_s),
        published_speedup=_ratio(least(*told[:2]), told[2]),
        planning_s=planning_s,
        claim=published.claim,
    )


def tuned_alone_s(traced, cluster: Cluster, profile: Profile | None) -> float | None:
    """Seconds of a step of ``ddp-tuned`` as the only planner, which finishes it with more care than ``auto``
    does. None if it does not fit."""
    try:
        plan = make_plan(traced, cluster, planner=DDP_TUNED, profile=profile, optimizer_states=ADAM)
    except Infeasible:
        return None
    return plan.predicted_step_s


def report(rows: Sequence[Row], command: str, below: Sequence[Floor] = ()) -> dict:
    """The object that ``--json`` prints and the file holds, with bounds and published steps."""
    return {
        "bench": "papers",
        "command": command,
        "revision": revision(),
        "source": "HAP (EuroSys'24), figure 12, times read from its bars",
        "tolerance": TOLERANCE,
        "rows": [{**asdict(row), "differs": list(row.differs)} for row in rows],
        "bounds": [{**asdict(floor), "is_below": floor.is_below} for floor in below],
    }


@dataclass(frozen=True)
class Floor:
    """A bound, and the shortest published step of the same model on the same devices."""

    case: str
    bound_s: float
    published_s: float
    source: str

    @property
    def is_below(self) -> bool:
        return self.bound_s <= self.published_s


def floors(rows: Iterable[Row]) -> tuple[Floor, ...]:
    """The bounds of these rows, and that of HAP's figure 14, each with the published step."""
    found = {}
    for row in rows:
        told = least(row.published_hap_s, row.published_ddp_even_s, row.published_ddp_proportional_s)
        if told and row.bound_s:
            case = f"{row.workload} on {row.gpus} GPUs"
            found[case] = Floor(case, row.bound_s, told, "HAP, figure 12")
    alone = HAP_FIGURE_14
    job = make(f"{alone.workload}:{alone.batch_per_gpu * alone.gpus}")
    costs = CostModel(Cluster.parse(alone.cluster))
    bound_s = Task(trace(job.model, job.batch).graph, costs, ADAM, lambda _: None).bound_s
    case = f"{alone.workload} on {alone.gpus} {alone.device}"
    return (*found.values(), Floor(case, bound_s, alone.step_s, alone.source))


def _ratio(ours: float | None, published: float | None) -> float | None:
    return ours / published if ours and published else None
