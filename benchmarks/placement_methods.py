"""The methods of the placement bench: their proposals, and their results by number of strategies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mixmesh.cluster.device import HEADROOM
from mixmesh.planner.learned import best_of, evaluator
from mixmesh.planner.pipelines import pipelines
from mixmesh.planner.placed import cuts, local_search
from mixmesh.planner.planners import BY_NAME
from mixmesh.planner.proposal import Proposal
from mixmesh.planner.task import Task
from mixmesh.search.evaluate import Evaluator
from mixmesh.search.learned.features import Facts
from mixmesh.search.learned.heterog import Training
from mixmesh.search.learned.mcts import Tree
from mixmesh.search.learned.seeds import judged_seeds
from mixmesh.search.learned.tag import TagPriors, load

from .placement_calls import Trace

MOST_S = 120.0  # limit of one search
JUDGED = 2  # best strategies of each search that the simulator judges


@dataclass(frozen=True)
class Budget:
    calls: int
    seeds: int


@dataclass(frozen=True)
class Found:
    """The proposals of a method; for every seed, its results by number of calls; and the step against which
    these are measured."""

    proposals: Sequence[Proposal]
    traces: Sequence[Trace] = ()
    base_s: float = math.inf


def uniform(task: Task, budget: Budget) -> Found:
    return _trees(task, budget, with_policy=False)


def tag(task: Task, budget: Budget) -> Found:
    return _trees(task, budget, with_policy=True)


def _trees(task: Task, budget: Budget, with_policy: bool) -> Found:
    first = evaluator(task, "partition")
    facts = Facts(first.space, task.optimizer_states, HEADROOM)
    searches: list[_Search] = []
    for seed in range(budget.seeds):
        search = _Search(task, Evaluator(first.space, first.judge, max_s=MOST_S))
        priors = TagPriors(load(), facts) if with_policy else None
        Tree(search.limited(budget), search.base_s, priors, seed).run()
        searches.append(search)
    return searches[0].found([search.trace for search in searches])


def heterog(task: Task, budget: Budget) -> Found:
    evaluate = evaluator(task, "centres")
    facts = Facts(evaluate.space, task.optimizer_states, HEADROOM)
    training = Training(evaluate, facts, cuts(evaluate.space, task))
    search = _Search(task, evaluate)
    search.limited(budget)
    training.run()
    return search.found()


def local(task: Task, budget: Budget) -> Found:
    search = _Search(task, evaluator(task, "partition"))
    most = search.seeded + budget.calls
    found = local_search(task, search.evaluate.space, max_evaluations=most, max_s=MOST_S)
    for strategy in found.judged:  # in the order in which they were tried
        search.evaluate(strategy)
    return search.found()


def synthesis(task: Task, _: Budget) -> Found:
    """HAP's: no placements, and no calls that compare."""
    return Found(list(BY_NAME["hap"].propose(task)))


def pipeline(task: Task, _: Budget) -> Found:
    """Chains of stages in micro-batches; none for models with statistics of the whole batch."""
    return Found(list(pipelines(task)))


METHODS: dict[str, Callable[[Task, Budget], Found]] = {
    "uniform": uniform,
    "tag": tag,
    "heterog": heterog,
    "local": local,
    "hap": synthesis,
    "hap-local": synthesis,
    "pipeline": pipeline,
}
LOCAL_METHODS = ("hap-local",)  # asked of the model whose batch norm takes each rank's own statistics


class _Search:
    """An evaluator that has judged the seeds, and how many those are."""

    def __init__(self, task: Task, evaluate: Evaluator) -> None:
        self.task, self.evaluate = task, evaluate
        self.base_s = judged_seeds(evaluate, cuts(evaluate.space, task))[1]
        self.seeded = evaluate.calls

    def limited(self, budget: Budget) -> Evaluator:
        self.evaluate.max_calls = self.seeded + budget.calls
        return self.evaluate

    @property
    def trace(self) -> Trace:
        improved = self.evaluate.improved
        return tuple((n - self.seeded, o.step_s) for n, o in improved if o.fits and n > self.seeded)

    def found(self, traces: Sequence[Trace] = ()) -> Found:
        best = best_of(self.task, "placement", self.evaluate, JUDGED)
        return Found(list(best), traces or (self.trace,), self.base_s)
