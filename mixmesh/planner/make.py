"""Makes a plan from a graph and a cluster."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from ..base.units import plural
from ..cluster import Cluster
from ..cost import CostModel
from ..cost.gaps import gaps
from ..cost.placed import Sheet
from ..cost.tf32 import tf32_warnings
from ..errors import InputError
from ..lang.ir import Graph, Returned, with_rows_as_dealt
from ..lang.ir.graph import has_gradient
from ..lang.plan_devices import planned_devices
from ..lang.plan_file import Candidate, Plan
from .answers import check_memory, dtype_warnings, infeasible, notes_of, warnings_of
from .finalists import finalists
from .finished import finish
from .offered import offer
from .options import Options
from .passes import CHECKPOINTING, SPELLING, results_of
from .planners import BY_NAME
from .proposal import BASELINES, Proposal
from .propose import Asked, asked_by, proposals_of
from .proved import proved
from .task import Task
from .whole import whole_batch_warnings

COLLECTED_AFTER = 1_000_000  # number of new objects; planning makes many, all in use and without cycles
Say = Callable[[str], None]


class Traced(Protocol):
    """A traced model: the result of ``mixmesh.frontend.trace.trace``."""

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
    @property
    def left(self) -> tuple[str, ...]: ...


def make_plan(
    traced: Traced | Graph, cluster: Cluster, *, progress: Say | None = None, **options: Any
) -> Plan:
    """The best plan for a model on a cluster; ``options`` are the fields of ``Options``, by name. If there
    are fewer samples than devices, data parallelism leaves some devices out; tensor parallelism divides no
    samples.

    Raises InputError for an unknown planner, Infeasible if nothing fits.
    """
    (plan,) = make_plans(traced, cluster, progress=progress, **options)
    return plan


def make_plans(
    traced: Traced | Graph, cluster: Cluster, *, count: int = 1, progress: Say | None = None, **options: Any
) -> tuple[Plan, ...]:
    """The plan of ``make_plan``, and up to ``count - 1`` of other kinds that may be as fast, the fastest by
    prediction first (``finalists``)."""
    wanted = Options(**options)
    with untouched():
        tf32 = traced.tf32 if wanted.tf32 is None and not isinstance(traced, Graph) else bool(wanted.tf32)
        costs = CostModel(cluster, wanted.profile, wanted.unmeasured, tf32=tf32)
        return plans_of(traced, costs, wanted, count, progress or (lambda _: None))


@contextmanager
def untouched() -> Iterator[None]:
    """A context in which the garbage collector does not repeatedly traverse older objects, such as all of
    PyTorch, nor the programs that planning keeps: together that took two thirds of the time."""
    if gc.get_freeze_count():
        yield  # the caller has done this
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER, *thresholds[1:])
    try:
        yield
    finally:
        # planning's objects count as old by now: otherwise the collector would traverse them at once
        gc.freeze()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def plans_of(
    traced: Traced | Graph, costs: CostModel, options: Options, count: int, progress: Say
) -> tuple[Plan, ...]:
    """The plans of ``make_plans``."""
    graph = traced if isinstance(traced, Graph) else traced.graph
    started = time.perf_counter()
    asked = asked_by(options)
    task = Task(graph, costs, options.optimizer_states, progress, asked.budget, options.whole_parameters)
    check_memory(task)
    if count > 1:
        task.kinds = {}
    chosen = choose(task, asked, options)
    planning_s = time.perf_counter() - started
    others = finalists(task, chosen, count) if count > 1 else []
    # a bare graph does not say how its model is called
    names = (
        () if isinstance(traced, Graph) else ("output_has_loss", "arguments", "returned", "autocast", "left")
    )
    called = {name: getattr(traced, name) for name in names}

    def finished_plan(p: Proposal) -> Plan:
        return replace(plan_of(task, p, planning_s), **called)

    fitting = [p for p in task.proposed.values() if p.feasible and p is not chosen]
    instead = sorted(fitting, key=lambda p: p.key)
    plans: dict[tuple, Plan] = {}  # several kinds may lead to the same program
    for plan in offer((chosen, *others), instead, finished_plan):
        plans.setdefault((plan.program, plan.micro_batches), plan)
    return tuple(plans.values())


def choose(task: Task, asked: Asked, options: Options) -> Proposal:
    """The fastest proposal that fits, after the passes of planning."""
    every = proposals_of(task, asked)
    check_proposed(task, options.planner)
    chosen = min(task.proposed.values(), key=lambda p: p.key)
    if options.exact_s is not None:
        chosen = task.proposed[chosen.planner] = proved(task, chosen, options.exact_s)
    return chosen if options.planner in BASELINES else finish(task, chosen, every)


def check_proposed(task: Task, planner: str) -> None:
    """Raises InputError if nothing was proposed, Infeasible if no proposal fits."""
    cluster = task.costs.cluster
    if not task.proposed:
        needs = BY_NAME[planner].needs if planner in BY_NAME else ""
        machines = plural(len(cluster.machines), "machine")
        raise InputError(
            f"the planner {planner} has no plan for this job on this cluster",
            expected=f"what it is for: {needs or 'several devices'}",
            got=task.refused or f"{machines}, {plural(cluster.world_size, 'device')}",
            hint=(*_without_outputs(task.graph, planner), 'planner="auto"'),
        )
    if not any(p.feasible for p in task.proposed.values()):
        raise infeasible(task, list(task.proposed.values()))


def _without_outputs(graph: Graph, planner: str) -> tuple[str, ...]:
    """Hints for a pipeline that is asked for outputs, which it does not give."""
    outputs = [node for node in graph.nodes if node.op == "output"]
    if planner != "pipeline" or not outputs:
        return ()
    if any(map(has_gradient, outputs)):
        return ("a pipeline gives no outputs: let it compute the loss, mixmesh.prepare(..., loss=criterion)",)
    return ("a pipeline gives the loss alone: no outputs=, and no self.log of other values in training",)


def plan_of(task: Task, proposal: Proposal, planning_s: float) -> Plan:
    """Makes the plan of a proposal, with the task's other findings."""
    cluster, graph = task.costs.cluster, task.graph
    candidates = sorted(task.proposed.values(), key=lambda p: p.key)
    proposal = spelled = CHECKPOINTING(task, proposal, task.budget)
    for row in SPELLING:
        spelled = row(task, spelled, task.budget)
    # shares that became 0 after the program was spelled leave ranks without outputs
    program = replace(with_rows_as_dealt(spelled.program), dtypes=task.dtypes)
    # with micro-batches the simulation has only the cost table of a single one
    is_simulated = proposal.micro_batches is None and program.body is spelled.program.body
    sheet = proposal.simulation.sheet if is_simulated else Sheet(program, task.costs)
    return Plan(
        program=program,
        planner=proposal.planner,
        predicted_step_s=proposal.timeline.step_s,
        predicted_peak_memory_bytes=proposal.simulation.process_bytes(
            proposal.program, proposal.micro_batches, task.usable_bytes
        ),
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
        optimizer_states=task.optimizer_states,
        notes=notes_of(program, sheet),
    )
