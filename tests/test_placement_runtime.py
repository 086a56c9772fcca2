"""Strategies of op groups between three processes: losses, gradients and parameters equal the single
device's, buffers too, and who has no share in a strategy joins nothing of it."""

from __future__ import annotations

import random

import pytest
import torch
from gloo_world import assert_passed, assert_trains_alike, run_world
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import even_ratio
from mixmesh.search.baselines import data_parallel
from mixmesh.search.placement import Placed, Space, make_grouping

WORLD, BATCH = 3, 8
CLUSTER = """\
name = "three"
[[machine]]
devices = [{ cpu_share = 0.6 }, { cpu_share = 0.3, count = 2 }]
"""


class Model(nn.Module):
    """A table for both ends, two branches between them, and statistics of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.left = nn.Linear(6, 6, dtype=torch.float64)
        self.right = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, ids, labels):
        x = self.norm(self.table(ids).mean(1))
        x = x + self.left(x).tanh() * self.right(x).sigmoid()
        return nn.functional.cross_entropy(x @ self.table.weight.T, labels)


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(10, (BATCH, 3), generator=torch.Generator().manual_seed(step))
    return {"ids": ids, "labels": ids[:, 0]}


def model_of() -> Model:
    torch.manual_seed(0)
    return Model()


def space() -> Space:
    costs = CostModel(Cluster.parse(CLUSTER))
    graph = trace(model_of(), batch(0)).graph
    return Space(data_parallel(graph, costs, even_ratio(WORLD)), costs, make_grouping(graph, costs, 6))


def strategy(seed: int | str):
    s = space()
    if seed == "without rank 1":
        pair, one = Placed((0.75, 0.0, 0.25), "sharded"), Placed((0.0, 0.0, 1.0))
        return s.lower([pair if k % 2 else one for k in range(len(s.groups))])
    draw = random.Random(seed)
    return s.lower([draw.choice(s.actions(k)) for k in range(len(s.groups))])


class Training:
    """A class, since closures do not pickle."""

    def __init__(self, seed: int | str) -> None:
        self.seed = seed

    def __call__(self, _) -> None:
        single, mine = model_of(), model_of()
        program = strategy(self.seed)
        assert_trains_alike(single, mine, program, map(batch, range(3)))


CHECKS = {f"strategy {seed}": Training(seed) for seed in (0, 1, 2, 3, 4, "without rank 1")}


@pytest.fixture(scope="module")
def results():
    return run_world(WORLD, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])


def test_who_has_no_share_joins_nothing():
    program = strategy("without rank 1")
    assert all(1 not in program.participants(t) for i in program.instructions for t in i.types)
