"""From a graph and a cluster to a plan."""

from __future__ import annotations

import difflib
import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from ..cluster import Cluster
from ..cost import CostModel, Profile
from ..cost.gaps import gaps
from ..cost.placed import Sheet
from ..cost.tf32 import tf32_warnings
from ..errors import InputError
from ..lang.ir import Graph, Returned, regions
from ..lang.optimizer_states import ADAM, OptimizerStates
from ..lang.plan_devices import planned_devices
from ..lang.plan_file import Candidate, Plan
from . import simple
from .answers import check_memory, dtype_warnings, infeasible, notes_of, warnings_of
from .device_sets import machine_sets
from .finalists import finalists
from .finished import SUMMED_AT_ONCE, finished, finished_near
from .hap import DDP_TUNED, synthesised, tuned
from .learned import has_torch_geometric, heterog, tag
from .near import best_synced
from .offered import offer
from .passes import CHECKPOINTING, SPELLING, results_of
from .pipelines import hopeful, least_pipeline_s, pipelines
from .placed import model_parallel, placed
from .poplar import poplar
from .proposal import BASELINES, Proposal
from .proved import check_limit, proved
from .segments import segments
from .task import SEARCH_S, Task
from .two_level import least_two_level_s, machines_of, promising, two_level
from .whole import whole_batch_warnings

# one row per planner: what proposes its programs
PROPOSERS: dict[str, Callable[[Task], Iterator[Proposal]]] = {
    "single": simple.single,
    "ddp-even": simple.ddp_even,
    "ddp-proportional": simple.ddp_proportional,
    "fsdp-even": simple.fsdp_even,
    DDP_TUNED: tuned,
    "hap": synthesised,
    "poplar": poplar,
    "tensor-parallel": simple.tensor_parallel_proportional,
    "model-parallel": model_parallel,
    "pipeline": pipelines,
    "segments": segments,
    "two-level": two_level,
    "placed": placed,
    "heterog": heterog,
    "tag": tag,
}
# planners that ``auto`` asks, in this order: the baselines are the bar that others must pass
AUTO = (*BASELINES, DDP_TUNED, "hap", "two-level", "pipeline")
# planners that it asks where no search is allowed, and those that follow a search
QUICK = {"two-level": promising, "pipeline": hopeful}
# planners that it asks for sets of machines too: the least that a step on a set may take, None if it is not
# worth asking; and the nodes of graphs, one for each machine of each set, that there is time for
ON_MACHINE_SETS = {"two-level": (least_two_level_s, 400), "pipeline": (least_pipeline_s, 250)}
LEADING = 4  # times as much time for sets of machines has a planner whose plan for all of them is the fastest
SLOW = ("poplar", "model-parallel", "segments")  # seconds each, asked too where a search is allowed
# as long as they may. None of their placements has micro-steps, so pipelines are looked at after them
SEARCHING = ("placed", "heterog", "tag")
LEARNED = ("heterog", "tag")
LAST_RESORT = ("poplar", "model-parallel")  # and where nothing else fits
NEEDS = {
    "two-level": "two machines or more, one of them with several devices, and a batch to be dealt out",
    "pipeline": "several devices, a model that can run in micro-steps, and a batch that they divide",
}
PLANNERS = ("auto", *PROPOSERS)
COLLECTED_AFTER = 1_000_000  # new objects; planning makes many, all of them needed, and no cycles


class Traced(Protocol):
    """A traced model: what ``mixmesh.frontend.trace.trace`` returns."""

    @property
    def graph(self) -> Graph: ...
    @property
    def output_has_loss(self) -> bool: ...
    @property
    def arguments(self) -> tuple[tuple[str, str], ...] | None: ...
    @property
    def autocast(self) -> tuple[str, str] | None: ...
    @property
    def returned(self) -> Returned: ...
    @property
    def tf32(self) -> bool: ...


def check_planner(planner: str) -> None:
    """Raises InputError for a planner that does not exist."""
    if planner in PLANNERS:
        return
    near = difflib.get_close_matches(planner, PLANNERS, 1)
    raise InputError(
        f"unknown planner {planner!r}",
        expected=", ".join(PLANNERS),
        got=planner,
        hint=f'planner="{near[0]}"' if near else "",
    )


def make_plan(
    traced: Traced | Graph,
    cluster: Cluster,
    *,
    planner: str = "auto",
    profile: Profile | None = None,
    optimizer_states: OptimizerStates = ADAM,
    whole_parameters: bool = False,
    search_s: float | None = None,
    exact_s: float | None = None,
    unmeasured: Collection[str] = (),
    tf32: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The best plan that ``planner`` finds. ``optimizer_states`` are tensors per parameter, and
    ``whole_parameters`` says that the optimizer steps no parts of them (LAMB);
    ``search_s`` is how long planners may search that have no end of their own (heterog, tag, placed: each
    ``SEARCH_S`` by default); ``auto`` asks these and other slow ones only where it is given, within it.
    ``exact_s`` is how long HiGHS may prove how far from the cheapest the chosen program is.
    ``unmeasured`` names mechanisms of GPUs to count on that were never measured (``cost.UNMEASURED``).
    ``tf32``: whether matrix products of float32 may run in TF32; None for what the job had when it was
    traced. A bare graph does not say, and then it is not counted on.

    With fewer samples than devices data parallelism leaves some out; tensor parallelism needs none.
    Raises InputError for an unknown planner, Infeasible if nothing fits.
    """
    (plan,) = make_plans(
        traced,
        cluster,
        planner=planner,
        profile=profile,
        optimizer_states=optimizer_states,
        whole_parameters=whole_parameters,
        search_s=search_s,
        exact_s=exact_s,
        unmeasured=unmeasured,
        tf32=tf32,
        progress=progress,
    )
    return plan


def make_plans(
    traced: Traced | Graph,
    cluster: Cluster,
    *,
    count: int = 1,
    planner: str = "auto",
    profile: Profile | None = None,
    optimizer_states: OptimizerStates = ADAM,
    whole_parameters: bool = False,
    search_s: float | None = None,
    exact_s: float | None = None,
    unmeasured: Collection[str] = (),
    tf32: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan, ...]:
    """The plan of ``make_plan``, and up to ``count - 1`` of other kinds that may be as fast, the fastest by
    prediction first (``finalists``)."""
    check_planner(planner)
    check_limit(exact_s)
    with untouched():
        optimizer = optimizer_states, whole_parameters
        tf32 = traced.tf32 if tf32 is None and not isinstance(traced, Graph) else bool(tf32)
        costs = CostModel(cluster, profile, unmeasured, tf32=tf32)
        return _make_plans(traced, costs, count, planner, optimizer, search_s, exact_s, progress)


@contextmanager
def untouched() -> Iterator[None]:
    """Keeps the garbage collector from looking again and again through what was there before, such as a
    whole PyTorch, and through programs that planning keeps: together that took two thirds of the time."""
    if gc.get_freeze_count():
        yield  # the caller did
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER, *thresholds[1:])
    try:
        yield
    finally:
        gc.freeze()  # planning's objects are old by now: else the collector looks through them at once
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def asked_by(planner: str, search_s: float | None) -> tuple[tuple[str, ...], tuple[str, ...], float]:
    """The planners that propose plans where ``planner`` is asked; those that do so only where nothing of
    these fits, which a quick search alone has; and the seconds that each planner without an end of its own
    may search."""
    if planner == "auto" and search_s is None:
        return AUTO, LAST_RESORT, SEARCH_S
    if planner == "auto":
        searching = [name for name in SEARCHING if name not in LEARNED or has_torch_geometric()]
        return (*AUTO, *SLOW, *searching), (), search_s / len(searching)
    names = (planner, "pipeline") if planner in SEARCHING else (planner,)
    return names, (), SEARCH_S if search_s is None else search_s


def check_proposed(task: Task, planner: str) -> None:
    """Raises InputError where nothing was proposed, Infeasible where nothing of it fits."""
    cluster = task.costs.cluster
    if not task.proposed:
        raise InputError(
            f"the planner {planner} has no plan for this job on this cluster",
            expected="what it is for: " + NEEDS.get(planner, "several devices"),
            got=task.refused or f"{len(cluster.machines)} machines, {cluster.world_size} devices",
            hint='planner="auto"',
        )
    if not any(p.feasible for p in task.proposed.values()):
        raise infeasible(task, list(task.proposed.values()))


def _make_plans(
    traced: Traced | Graph,
    costs: CostModel,
    count: int,
    planner: str,
    optimizer: tuple[OptimizerStates, bool],
    search_s: float | None,
    exact_s: float | None,
    progress: Callable[[str], None] | None,
) -> tuple[Plan, ...]:
    graph = traced if isinstance(traced, Graph) else traced.graph
    started = time.perf_counter()
    names, last, each_s = asked_by(planner, search_s)
    states, whole_parameters = optimizer
    task = Task(graph, costs, states, progress or (lambda _: None), each_s, whole_parameters)
    check_memory(task)
    task.quick = bool(last)
    if count > 1:
        task.kinds = {}
    every = proposals_of(task, names, last, planner)
    best = task.proposed
    check_proposed(task, planner)
    chosen = min(best.values(), key=lambda p: p.key)
    if exact_s is not None:
        chosen = best[chosen.planner] = proved(task, chosen, exact_s)
    if planner not in BASELINES:
        chosen = finish(task, chosen, every)
    planning_s = time.perf_counter() - started
    others = finalists(task, chosen, count) if count > 1 else []
    # a bare graph does not say how its model is called
    names = () if isinstance(traced, Graph) else ("output_has_loss", "arguments", "returned", "autocast")
    called = {name: getattr(traced, name) for name in names}

    def made_of(p: Proposal) -> Plan:
        return replace(plan_of(task, p, planning_s), **called)

    instead = sorted((p for p in best.values() if p.feasible and p is not chosen), key=lambda p: p.key)
    plans: dict[tuple, Plan] = {}  # kinds may come to the same program
    for finished_plan in offer((chosen, *others), instead, made_of):
        plans.setdefault((finished_plan.program, finished_plan.micro_batches), finished_plan)
    return tuple(plans.values())


def proposals_of(task: Task, names: Sequence[str], last: Sequence[str], planner: str) -> list[Proposal]:
    """Proposals of the planners of these ``names``, and if none fits of those named ``last``. The best
    of each is in ``task.proposed``. ``planner`` is the one that was asked for."""
    best, every, to_sum = task.proposed, [], []
    for name in (*names, *last):
        # a plan that fits only with activations that are computed again may be far from the best that fits
        if name in last and any(p.feasible and not regions(p.program) for p in best.values()):
            continue
        task.progress(f"planning: {name}")
        after_search = planner in SEARCHING and name != planner
        shortly = task.quick or (after_search and task.best_s < float("inf"))
        propose = QUICK.get(name, PROPOSERS[name]) if shortly else PROPOSERS[name]
        on_sets = planner == "auto" and name in ON_MACHINE_SETS
        proposals = list(propose(task))
        if on_sets:
            leads = any(p.feasible and p.timeline.step_s <= task.best_s for p in proposals)
            proposals += on_machine_sets(task, name, leads=leads)
        every += proposals
        if proposals:
            best[name] = min(proposals, key=lambda p: p.key)
        if name in SUMMED_AT_ONCE:
            to_sum += proposals
            # a search is not held against sums that its own programs have not been given yet
            if to_sum and not (name == DDP_TUNED and "hap" in names):
                summed = best_synced(task, to_sum, quick=task.quick)
                every += summed.values()
                best |= summed
    return every


def on_machine_sets(task: Task, name: str, *, leads: bool) -> Iterator[Proposal]:
    """Proposals that a planner makes in little time for sets of machines that may be faster than all
    of them, first those with the least to do at least: as many as there is time for. ``leads``: its plan for
    all machines is the fastest so far. Of sets with equally much to do, those whose machines have the fastest
    links inside come first."""
    least, nodes = ON_MACHINE_SETS[name]
    nodes *= LEADING if leads else 1
    views = [task.on(ranks) for ranks in machine_sets(task) if ranks != task.ranks]
    worth = {view.ranks: least_s for view in views if (least_s := least(view)) is not None}
    cluster = task.costs.cluster

    def slowest_link(ranks: tuple[int, ...]) -> float:
        return min(cluster.machines[m].link_bytes_per_s for m in {*map(cluster.machine_index_of, ranks)})

    for ranks in sorted(worth, key=lambda ranks: (worth[ranks], -slowest_link(ranks))):
        view = task.on(ranks)
        needed = len(task.graph.nodes) * len(machines_of(view))
        if worth[ranks] < task.best_s and needed <= nodes:
            nodes -= needed
            yield from QUICK[name](view)


def finish(task: Task, chosen: Proposal, every: Sequence[Proposal]) -> Proposal:
    """The fastest in the end, where ``chosen`` is so far. A last resort has its micro-steps, to which little
    can be done; the others may gain more."""
    usual = [p for p in every if p.feasible and p.planner not in (*BASELINES, *LAST_RESORT)]
    is_usual = chosen.planner not in (*BASELINES, *LAST_RESORT)
    near = []
    if usual and (is_usual or task.quick):
        near = finished_near(task, [chosen, *usual] if is_usual else usual, quick=task.quick)
    if not is_usual:
        near.append(finished(task, chosen, quick=task.quick))
    for proposal in near:
        earlier = task.proposed.get(proposal.planner, proposal)
        task.proposed[proposal.planner] = min(proposal, earlier, key=lambda p: p.key)
    return min(near, key=lambda p: p.key)


def plan_of(task: Task, proposal: Proposal, planning_s: float) -> Plan:
    """The plan of a proposal, with what the task has found beside it."""
    cluster, graph = task.costs.cluster, task.graph
    candidates = sorted(task.proposed.values(), key=lambda p: p.key)
    proposal = spelled = CHECKPOINTING(task, proposal, quick=task.quick)
    for row in SPELLING:
        spelled = row(task, spelled, quick=task.quick)
    program = replace(spelled.program, dtypes=task.dtypes)
    # with micro-steps the simulation's is that of one of them
    sheet = proposal.simulation.sheet if proposal.micro_batches is None else Sheet(program, task.costs)
    return Plan(
        program=program,
        planner=proposal.planner,
        predicted_step_s=proposal.timeline.step_s,
        predicted_peak_memory_bytes=proposal.peak_memory_bytes,
        cluster_fingerprint=cluster.fingerprint,
        cluster_name=cluster.name,
        graph_fingerprint=graph.fingerprint,
        planning_s=planning_s,
        states_expanded=task.states_expanded,
        timings_s=dict(task.timings_s),
        passes=results_of(task, spelled),
        gap=proposal.gap,
        bound_s=task.bound_s,
        ideal_s=task.ideal_s,
        cost_source=task.costs.source,
        candidates=tuple(Candidate(p.planner, p.feasible, p.timeline.step_s) for p in candidates),
        warnings=(
            *warnings_of(graph, program),
            *whole_batch_warnings(graph, program),
            *dtype_warnings(task, program),
            *gaps(program, task.costs),
            *tf32_warnings(task.costs, graph),
        ),
        micro_batches=proposal.micro_batches,
        devices=planned_devices(cluster),
        usable_bytes=tuple(int(size) for size in task.usable_bytes),
        tf32=task.costs.tf32,
        notes=notes_of(program, sheet),
    )
