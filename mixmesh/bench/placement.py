"""Placements of op groups, found in four ways, beside synthesis, pipelines and the baselines: how fast, and
after how many tries.

Every search has the same budget of strategies, asks the same estimate of groups, and begins with the same
seeds; the simulator judges the best that each found. TAG's policy was trained on random models and clusters
(``policies.problems``): every model and cluster here is held out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from ..cost import CostModel
from ..errors import InputError
from ..planner.learned import best_of, evaluator
from ..planner.make import PROPOSERS
from ..planner.pipelines import pipelines
from ..planner.placed import cuts, local_search
from ..planner.task import HEADROOM, Proposal, Task
from ..policies.evaluate import Evaluator
from ..policies.features import Facts
from ..policies.heterog import Training
from ..policies.mcts import Tree
from ..policies.seeds import judged_seeds
from ..policies.tag import TagPriors, load
from ..trace import trace
from ..workloads import make
from .placement_cases import CASES, Case

ADAM_STATES = 2
CALLS = 1000  # strategies that each search may ask for
MOST_S = 120.0  # of one search
JUDGED = 2  # by the simulator, of each search
DATA_PARALLEL = ("ddp-even", "ddp-proportional")
BASELINES = (*DATA_PARALLEL, "single")
BETTER = 1.01  # times as fast as the best seed: found something
CLAIM = 1.30  # HeteroG over the best of its data parallel baselines, geometric mean


@dataclass(frozen=True)
class Row:
    """One method on one case. ``step_s`` None: nothing fits. ``calls`` are strategies asked for;
    ``better_after`` so many of them the estimate was ``BETTER`` than the best seed's, ``level_after`` it was
    as good as all that the uniform search found; None if never."""

    workload: str
    cluster: str
    links: str
    global_batch: int
    role: str
    method: str
    step_s: float | None
    data_parallel_s: float | None
    baseline_s: float | None
    calls: int
    better_after: int | None
    level_after: int | None
    cpu_s: float
    bound_s: float | None = None  # that no plan is faster than

    @property
    def most(self) -> float | None:
        """The largest speed-up that any plan could have."""
        return self.data_parallel_s / self.bound_s if self.data_parallel_s and self.bound_s else None

    @property
    def speedup(self) -> float | None:
        """Over the better of the data parallel ones."""
        return self.data_parallel_s / self.step_s if self.data_parallel_s and self.step_s else None

    @property
    def name(self) -> str:
        return f"{self.workload}@{self.cluster}"

    @property
    def over_baseline(self) -> float | None:
        return self.baseline_s / self.step_s if self.baseline_s and self.step_s else None


Progress = Callable[[str], None]
Trace = list[tuple[int, float]]  # (calls, estimated seconds of the best that fits)


def cases(names: Sequence[str] = (), quick: bool = False) -> tuple[Case, ...]:
    """Raises InputError for a name that is no workload, cluster or WORKLOAD@CLUSTER of the bench."""
    known = {n for c in CASES for n in (c.workload, c.cluster, c.name)}
    for name in names:
        if name not in known:
            raise InputError(f"no case {name!r}", expected=", ".join(sorted(known)), got=name)
    if names:
        return tuple(c for c in CASES if {c.workload, c.cluster, c.name} & {*names})
    return tuple(c for c in CASES if c.quick or not quick)


def methods_of(names: Sequence[str]) -> tuple[str, ...]:
    """All without names. Raises InputError for one that is no method."""
    for name in names:
        if name not in METHODS:
            raise InputError(f"no method {name!r}", expected=", ".join(METHODS), got=name)
    return tuple(names) or tuple(METHODS)


def run(
    chosen: Sequence[Case],
    progress: Progress = lambda _: None,
    calls: int = CALLS,
    methods: Sequence[str] = (),
) -> Iterator[Row]:
    """A row per case and method, all of them without names."""
    graphs: dict[tuple[str, int], object] = {}
    for case in chosen:
        key = (case.workload, case.global_batch)
        if key not in graphs:
            progress(f"{case.name}: tracing")
            job = make(f"{case.workload}:{case.global_batch}")
            graphs[key] = trace(job.model, job.batch).graph
        costs = CostModel(case.devices())
        task = Task(graphs[key], costs, ADAM_STATES, lambda _: None, MOST_S)
        yield from run_case(case, task, calls, progress, methods_of(methods))


def run_case(case: Case, task: Task, calls: int, progress: Progress, methods: Sequence[str]) -> Iterator[Row]:
    progress(f"{case.name}: baselines")
    steps = {name: _fastest(PROPOSERS[name](task)) for name in BASELINES}
    data_parallel = min((s for n, s in steps.items() if n in DATA_PARALLEL and s), default=None)
    baseline = min((s for s in steps.values() if s), default=None)
    level: float | None = None
    for method in methods:
        search = METHODS[method]
        progress(f"{case.name}: {method}")
        started = time.process_time()
        proposals, found, base_s = search(task, calls)
        step_s = _fastest(proposals)
        if method == "uniform":
            level = found[-1][1] if found else None
        yield Row(
            workload=case.workload,
            cluster=case.cluster,
            links=case.links,
            global_batch=case.global_batch,
            role=case.role,
            method=method,
            step_s=step_s,
            data_parallel_s=data_parallel,
            baseline_s=baseline,
            calls=calls if found else 0,
            better_after=_after(found, base_s / BETTER),
            level_after=None if level is None else _after(found, level * 1.0001),
            cpu_s=time.process_time() - started,
            bound_s=task.bound_s,
        )


def _fastest(proposals: Iterator[Proposal] | Sequence[Proposal]) -> float | None:
    return min((p.timeline.step_s for p in proposals if p.feasible), default=None)


def _after(found: Trace, step_s: float) -> int | None:
    return next((calls for calls, seconds in found if seconds <= step_s), None)


# --- the methods: proposals, what was found when, and what it is measured by --------------------------------

Found = tuple[Sequence[Proposal], Trace, float]


def uniform(task: Task, calls: int) -> Found:
    return _tree(task, calls, with_policy=False)


def tag(task: Task, calls: int) -> Found:
    return _tree(task, calls, with_policy=True)


def _tree(task: Task, calls: int, with_policy: bool) -> Found:
    evaluate = evaluator(task, "partition")
    _, base_s = judged_seeds(evaluate, cuts(evaluate.space, task))
    seeded = evaluate.calls
    evaluate.max_calls = seeded + calls
    priors = None
    if with_policy:
        priors = TagPriors(load(), Facts(evaluate.space, task.optimizer_states, HEADROOM))
    Tree(evaluate, base_s, priors).run()
    return _judged(task, evaluate, seeded, base_s)


def heterog(task: Task, calls: int) -> Found:
    evaluate = evaluator(task, "centres")
    training = Training(
        evaluate, Facts(evaluate.space, task.optimizer_states, HEADROOM), cuts(evaluate.space, task)
    )
    seeded = evaluate.calls
    evaluate.max_calls = seeded + calls
    training.run()
    return _judged(task, evaluate, seeded, training.base_s)


def local(task: Task, calls: int) -> Found:
    evaluate = evaluator(task, "partition")
    _, base_s = judged_seeds(evaluate, cuts(evaluate.space, task))
    seeded = evaluate.calls
    found = local_search(task, evaluate.space, max_evaluations=seeded + calls, max_s=MOST_S)
    for strategy in found.seen:  # in the order in which they were tried
        evaluate(strategy)
    return _judged(task, evaluate, seeded, base_s)


def synthesis(task: Task, calls: int) -> Found:
    """HAP's: no placements, and no calls that compare."""
    return list(PROPOSERS["hap"](task)), [], math.inf


def pipeline(task: Task, calls: int) -> Found:
    """Chains of stages in micro-steps; none for models with statistics of the whole batch."""
    return list(pipelines(task)), [], math.inf


METHODS: dict[str, Callable[[Task, int], Found]] = {
    "uniform": uniform,
    "tag": tag,
    "heterog": heterog,
    "local": local,
    "hap": synthesis,
    "pipeline": pipeline,
}


def _judged(task: Task, evaluate: Evaluator, seeded: int, base_s: float) -> Found:
    found = [(max(calls - seeded, 0), o.step_s) for calls, o in evaluate.improved if o.fits]
    return list(best_of(task, "placement", evaluate, JUDGED)), found, base_s


def summary(rows: Sequence[Row]) -> dict:
    """Geometric means, and the calls of TAG against those of the uniform search on equal cases."""
    own = [r for r in rows if r.role == "heterog" and r.speedup]
    by_links = {
        links: {
            "most possible": geometric_mean(
                [*{r.name: r.most for r in own if r.links == links}.values()],
            ),
            "best placement or pipeline": geometric_mean(
                _best([r for r in own if r.links == links and r.method != "hap"])
            ),
            "best placement": geometric_mean(
                _best([r for r in own if r.links == links and r.method not in ("hap", "pipeline")])
            ),
            **{
                name: geometric_mean([r.speedup for r in own if r.links == links and r.method == name])
                for name in dict.fromkeys(r.method for r in rows)
            },
        }
        for links in dict.fromkeys(r.links for r in own)
    }
    by_case: dict[tuple, dict[str, Row]] = {}
    for r in rows:
        by_case.setdefault((r.workload, r.cluster, r.links, r.global_batch), {})[r.method] = r
    pairs = [
        (m["tag"].level_after, m["uniform"].level_after)
        for m in by_case.values()
        if {"tag", "uniform"} <= {*m} and m["uniform"].better_after is not None
    ]
    fewer = [(a, b) for a, b in pairs if a is not None and b and a <= b / 2]
    return {
        "heterog_speedup": by_links,
        "claim": CLAIM,
        "cases_where_uniform_found_something": len(pairs),
        "of_these_tag_as_good_within_half_the_calls": len(fewer),
    }


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
    """What ``--json`` prints and the file holds."""
    return {
        "bench": "placement",
        "command": command,
        "rows": [
            {**asdict(r), "speedup": r.speedup, "most": r.most, "over_baseline": r.over_baseline}
            for r in rows
        ],
        **summary(rows),
    }
