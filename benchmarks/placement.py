"""Placements of op groups, found in four ways, compared with synthesis, pipelines and the baselines: the
speed of the results, and the number of tries.

Every search has the same budget of strategies, uses the same estimate of groups, and begins with the same
seeds; the simulator judges the best strategies of each. Tree searches run with several random seeds, and the
simulator judges the results of the first. TAG's policy was trained on random models and clusters
(``tools.tag.problems``): every model and cluster here is held out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from mixmesh.cost import CostModel
from mixmesh.errors import InputError
from mixmesh.frontend.job.workloads import make
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import BATCH_NORMS, Graph
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.planner.budget import AMPLE
from mixmesh.planner.finished import arranged
from mixmesh.planner.hap import DDP_TUNED
from mixmesh.planner.near import reduced_near
from mixmesh.planner.placed import judged
from mixmesh.planner.planners import BY_NAME
from mixmesh.planner.proposal import Proposal
from mixmesh.planner.spaces import space_of
from mixmesh.planner.task import Task
from mixmesh.search.learned.seeds import data_parallel

from .bars import fastest_s, least, machine_alone_s
from .placement_calls import better_after, level_after, level_of, median, race
from .placement_cases import CASES, Case
from .placement_methods import LOCAL_METHODS, METHODS, MOST_S, Budget
from .revision import revision

BUDGET = replace(AMPLE, search_s=MOST_S)
CALLS = 1000  # strategies that each search may evaluate
SEEDS = 5  # random seeds of a tree search
DATA_PARALLEL = ("ddp-even", "ddp-proportional")
BASELINES = (*DATA_PARALLEL, "single")
SEARCHES = ("uniform", "tag", "heterog", "local")
EXACT_DDP, LOCAL_DDP, TUNED_DDP, BY_HAND = "exact DDP", "local DDP", "tuned DDP", "best by hand"
CLAIM = 1.30  # HeteroG over the best of its data parallel baselines, geometric mean


@dataclass(frozen=True)
class Row:
    """One method on one case. ``step_s`` is None if nothing fits. ``weakest_s`` is that of the slowest
    data-parallel scheme that fits: even or proportional, by AllReduce or parameter servers. ``calls`` counts
    the strategies asked for. ``better_calls``, by seed, counts them until the estimate was 1 % better than
    the best seed's, and ``level_calls`` until it was as good as the median end of the uniform search; None if
    that never happened, and empty if nothing is compared. ``better_after`` and ``level_after`` are their
    medians."""

    workload: str
    cluster: str
    links: str
    global_batch: int
    role: str
    method: str
    step_s: float | None
    data_parallel_s: float | None
    baseline_s: float | None
    weakest_s: float | None
    calls: int
    better_calls: tuple[int | None, ...]
    level_calls: tuple[int | None, ...]
    cpu_s: float
    bound_s: float | None = None  # lower bound of any plan's step
    local_s: float | None = None  # the better data parallelism with local batch norm
    tuned_s: float | None = None  # data parallelism done well (``ddp-tuned``), with all passes
    alone_s: float | None = None  # the best data parallelism on a single machine

    @property
    def most(self) -> float | None:
        """The largest speed-up that any plan could have."""
        return self.data_parallel_s / self.bound_s if self.data_parallel_s and self.bound_s else None

    @property
    def better_after(self) -> int | None:
        return median(self.better_calls, self.calls)

    @property
    def level_after(self) -> int | None:
        return median(self.level_calls, self.calls)

    @property
    def speedup(self) -> float | None:
        """Over the better of the data parallel ones."""
        return self.data_parallel_s / self.step_s if self.data_parallel_s and self.step_s else None

    @property
    def over(self) -> dict[str, float | None]:
        """The speed-up over each of the baselines that the claim is stated over."""
        bars = {EXACT_DDP: self.data_parallel_s, LOCAL_DDP: self.local_s, TUNED_DDP: self.tuned_s}
        bars[BY_HAND] = least(self.data_parallel_s, self.local_s, self.baseline_s, self.alone_s)
        return {name: bar / self.step_s if bar and self.step_s else None for name, bar in bars.items()}

    @property
    def name(self) -> str:
        return f"{self.workload}@{self.cluster}"

    @property
    def over_baseline(self) -> float | None:
        return self.baseline_s / self.step_s if self.baseline_s and self.step_s else None

    @property
    def over_weakest(self) -> float | None:
        return self.weakest_s / self.step_s if self.weakest_s and self.step_s else None


Progress = Callable[[str], None]


def cases(names: Sequence[str] = (), quick: bool = False) -> tuple[Case, ...]:
    """The cases of these names. Raises InputError for a name that is not a workload, cluster or
    WORKLOAD@CLUSTER of the bench."""
    known = {n for c in CASES for n in (c.workload, c.cluster, c.name)}
    for name in names:
        if name not in known:
            raise InputError(f"no case {name!r}", expected=", ".join(sorted(known)), got=name)
    if names:
        return tuple(c for c in CASES if {c.workload, c.cluster, c.name} & {*names})
    return tuple(c for c in CASES if c.quick or not quick)


def methods_of(names: Sequence[str]) -> tuple[str, ...]:
    """The methods of these names; without names, all of them. Raises InputError for an unknown one."""
    for name in names:
        if name not in METHODS:
            raise InputError(f"no method {name!r}", expected=", ".join(METHODS), got=name)
    return tuple(names) or tuple(METHODS)


def run(
    chosen: Sequence[Case],
    progress: Progress = lambda _: None,
    calls: int = CALLS,
    methods: Sequence[str] = (),
    seeds: int = SEEDS,
    unmeasured: Sequence[str] = (),
) -> Iterator[Row]:
    """Yields a row per case and method (without names, all methods); tree searches run with each of the
    seeds."""
    graphs: dict[tuple[str, int], tuple[Graph, Graph]] = {}  # with batch norm of all samples, of each rank's
    for case in chosen:
        key = (case.workload, case.global_batch)
        if key not in graphs:
            progress(f"{case.name}: tracing")
            job = make(f"{case.workload}:{case.global_batch}")
            graphs[key] = tuple(trace(job.model, job.batch, batch_norm=kind).graph for kind in BATCH_NORMS)
        costs = CostModel(case.devices(), unmeasured=unmeasured)
        tasks = [Task(graph, costs, ADAM, lambda _: None, BUDGET) for graph in graphs[key]]
        yield from run_case(case, *tasks, Budget(calls, seeds), progress, methods_of(methods))


def run_case(
    case: Case, task: Task, local_task: Task, budget: Budget, progress: Progress, methods: Sequence[str]
) -> Iterator[Row]:
    """Rows of one case; ``local_task`` is the same with batch norm of each rank's own samples."""
    progress(f"{case.name}: baselines")
    local_s = fastest_s(local_task, DATA_PARALLEL)
    costs = task.costs
    alone_s = machine_alone_s(task.graph, costs.cluster, ADAM, tuple(costs.unmeasured))
    # a separate task, so that no search profits from this one's results
    tuned = Task(task.graph, costs, ADAM, lambda _: None, BUDGET)
    tuned_s = _finished_s(tuned, list(BY_NAME[DDP_TUNED].propose(tuned)))
    steps = {name: _fastest(BY_NAME[name].propose(task)) for name in BASELINES}
    best_dp = min((s for n, s in steps.items() if n in DATA_PARALLEL and s), default=None)
    baseline = min((s for s in steps.values() if s), default=None)
    weakest = max(_schemes(task), default=None)
    level: float | None = None
    for method in methods:
        progress(f"{case.name}: {method}")
        started = time.process_time()
        asked = local_task if method in LOCAL_METHODS else task
        found = METHODS[method](asked, budget)
        step_s = _finished_s(asked, found.proposals)
        if method == "uniform":
            level = level_of(found.traces, found.base_s)
        yield Row(
            workload=case.workload,
            cluster=case.cluster,
            links=case.links,
            global_batch=case.global_batch,
            role=case.role,
            method=method,
            step_s=step_s,
            data_parallel_s=best_dp,
            baseline_s=baseline,
            weakest_s=weakest,
            calls=budget.calls if found.traces else 0,
            better_calls=better_after(found.traces, found.base_s),
            level_calls=level_after(found.traces, level),
            cpu_s=time.process_time() - started,
            bound_s=asked.bound_s,
            local_s=local_s,
            tuned_s=tuned_s,
            alone_s=alone_s,
        )


def _schemes(task: Task) -> Iterator[float]:
    """Steps of data parallelism that fits: even or proportional, by AllReduce or parameter servers."""
    space = space_of(task)
    for strategy in data_parallel(space):
        if not any(a.placed.sync == "sharded" for a in strategy):
            made = judged(task, "ddp-even", space, strategy)
            if made.feasible:
                yield made.timeline.step_s


def _finished_s(task: Task, proposals: Sequence[Proposal]) -> float | None:
    """Seconds of the best proposal, in the best of its orders and ways to sum gradients, as a plan has
    them."""
    fitting = [p for p in proposals if p.feasible]
    if not fitting:
        return None
    best: dict[str, Proposal] = {}
    for proposal in sorted((*fitting, *reduced_near(task, fitting)), key=lambda p: p.key):
        best.setdefault(proposal.planner, proposal)
    made = [arranged(task, proposal, task.budget) for proposal in best.values()]
    return min(p.timeline.step_s for p in (*made, *fitting))


def _fastest(proposals: Iterator[Proposal] | Sequence[Proposal]) -> float | None:
    return min((p.timeline.step_s for p in proposals if p.feasible), default=None)


def summary(rows: Sequence[Row]) -> dict:
    """Geometric means, and the calls of TAG compared with those of the uniform search on the same cases."""
    own = [r for r in rows if r.role == "heterog" and r.speedup]
    methods = tuple(dict.fromkeys(r.method for r in rows))
    by_links: dict[str, list[Row]] = {}
    for r in own:
        by_links.setdefault(r.links, []).append(r)
    by_case: dict[tuple, dict[str, Row]] = {}
    for r in rows:
        by_case.setdefault((r.workload, r.cluster, r.links, r.global_batch), {})[r.method] = r
    pairs = [(m["tag"], m["uniform"]) for m in by_case.values() if {"tag", "uniform"} <= {*m}]
    races = {
        "better": race([(t.better_after, u.better_after, u.calls) for t, u in pairs]),
        "level": race([(t.level_after, u.level_after, u.calls) for t, u in pairs]),
    }
    over = [r for r in rows if r.method == "tag" and r.over_weakest and r.over_baseline]
    most = max(over, key=lambda r: r.over_weakest, default=None)
    return {
        "heterog_speedup": {links: _means(found, methods) for links, found in by_links.items()},
        "heterog_speedup_by_cluster": {
            links: {
                cluster: _means([r for r in found if r.cluster == cluster], methods)
                for cluster in dict.fromkeys(r.cluster for r in found)
            }
            for links, found in by_links.items()
        },
        "claim": CLAIM,
        "heterog_speedup_over": _means_over(own),
        "pipelines": {
            name: asdict(found)
            for name in SEARCHES
            if (found := _with_pipelines(name, list(by_case.values()))).cases
        },
        "tag_calls_over_uniform": {name: asdict(found) for name, found in races.items()},
        "tag_best_case": most
        and {
            "case": f"{most.workload}@{most.cluster}, links {most.links}",
            "over_weakest": most.over_weakest,
            "over_baseline": most.over_baseline,
        },
    }


def _means_over(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Geometric means of speed-ups by method and links, on each cluster and on all, over each baseline."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for row in rows:
        found.setdefault(f"{row.method}, links {row.links}", {})
    for key in found:
        mine = [r for r in rows if f"{r.method}, links {r.links}" == key]
        clusters = dict.fromkeys(r.cluster for r in mine)
        groups = {c: [r for r in mine if r.cluster == c] for c in clusters} | {"all": mine}
        for where, members in groups.items():
            names = members[0].over
            found[key][where] = {n: geometric_mean([r.over[n] for r in members if r.over[n]]) for n in names}
    return found


def _means(rows: Sequence[Row], methods: Sequence[str]) -> dict[str, float | None]:
    """Geometric means of the speed-ups over data parallelism, of all that could be gained and by method."""
    exact = [r for r in rows if r.method not in LOCAL_METHODS]
    return {
        "most possible": geometric_mean(
            [*{(r.workload, r.cluster): r.most for r in exact if r.most}.values()]
        ),
        "best placement or pipeline": geometric_mean(_best([r for r in exact if r.method != "hap"])),
        "best placement": geometric_mean(_best([r for r in exact if r.method not in ("hap", "pipeline")])),
        **{name: geometric_mean([r.speedup for r in rows if r.method == name]) for name in methods},
    }


@dataclass(frozen=True)
class WithPipelines:
    """Pipelines compared with searches, over the cases that have both: in how many a pipeline is ``faster``
    than a search's result, or fits where that does not; geometric means of speed-ups over data parallelism,
    for the search ``alone`` and for the faster one (``together``)."""

    cases: int
    faster: int
    alone: float | None
    together: float | None


def _with_pipelines(method: str, by_case: Sequence[dict[str, Row]]) -> WithPipelines:
    pairs = [(m[method], m["pipeline"]) for m in by_case if {method, "pipeline"} <= {*m}]
    steps = [(a.step_s or math.inf, b.step_s or math.inf) for a, b in pairs]
    comparable = [(a, b) for a, b in pairs if a.speedup]
    return WithPipelines(
        len(pairs),
        sum(b < a for a, b in steps),
        geometric_mean([a.speedup for a, _ in comparable]),
        geometric_mean([max(a.speedup, b.speedup or 0.0) for a, b in comparable]),
    )


def _best(rows: Sequence[Row]) -> list[float]:
    """The largest speed-up of every case."""
    best: dict[tuple, float] = {}
    for r in rows:
        key = (r.workload, r.cluster)
        best[key] = max(best.get(key, 0.0), r.speedup or 0.0)
    return list(best.values())


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def report(rows: Sequence[Row], command: str) -> dict:
    """The object that ``--json`` prints and the file holds."""
    return {
        "bench": "placement",
        "command": command,
        "revision": revision(),
        "rows": [{**asdict(r), **_derived(r)} for r in rows],
        **summary(rows),
    }


def _derived(row: Row) -> dict:
    names = ("speedup", "most", "over_baseline", "over_weakest", "better_after", "level_after")
    return {**{name: getattr(row, name) for name in names}, "over": row.over}
