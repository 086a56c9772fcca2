"""TAG's trained weights: a search that they advise finds more within the same calls than one by chance."""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch
from tag_runs import OFFSET

from mixmesh.cluster.device import HEADROOM
from mixmesh.cost import CostModel
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.planner.placed import cuts
from mixmesh.planner.spaces import space_of
from mixmesh.planner.task import Task
from mixmesh.search.evaluate import Evaluator, measure_with
from mixmesh.search.learned.features import Facts
from mixmesh.search.learned.mcts import Tree
from mixmesh.search.learned.seeds import judged_seeds
from mixmesh.search.learned.tag import Policy, TagPriors, load
from tools.tag.problems import random_cluster, random_model

pytest.importorskip("torch_geometric")
# random models on random clusters that training has not seen, four of those where a search has much to find
PROBLEMS = 4, 7, 15, 21
CALLS, SEEDS = 30, 2
MARGIN = 0.985  # times the step that a search with other advice finds, in the geometric mean


def untrained(*, zero: bool) -> Policy:
    torch.manual_seed(0)
    policy = Policy()
    if zero:
        for tensor in policy.parameters():
            tensor.data.zero_()
    return policy.eval()


@functools.cache
def space_of_problem(number: int):
    rng = random.Random(OFFSET + number)
    model = random_model(rng)
    task = Task(model.graph, CostModel(random_cluster(rng, model.need_bytes)), ADAM, lambda _: None)
    space = space_of(task)
    return space, list(cuts(space, task)), Facts(space, ADAM, HEADROOM)


def found(number: int, seed: int, policy: Policy | None) -> float:
    """The estimated step that a search finds within ``CALLS``, over the best that it begins with."""
    space, borders, facts = space_of_problem(number)
    evaluate = Evaluator(space, measure_with(space, ADAM, HEADROOM))
    _, base_s = judged_seeds(evaluate, borders)
    evaluate.max_calls = evaluate.calls + CALLS
    Tree(evaluate, base_s, None if policy is None else TagPriors(policy, facts), seed).run()
    return min([base_s, *(o.step_s for _, o in evaluate.improved if o.fits)]) / base_s


def mean_of(policy: Policy | None) -> float:
    """The geometric mean over all problems and seeds."""
    logs = [math.log(found(n, seed, policy)) for n in PROBLEMS for seed in range(SEEDS)]
    return math.exp(sum(logs) / len(logs))


@functools.cache
def trained() -> float:
    return mean_of(load())


@pytest.mark.parametrize("advice", ["none", "zero weights", "random weights"])
def test_trained_weights_find_more_within_the_same_calls(advice):
    other = None if advice == "none" else untrained(zero=advice == "zero weights")
    assert trained() < MARGIN * mean_of(other)
