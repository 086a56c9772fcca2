"""Strategies of op groups: whatever is chosen for each group, the program trains as the single device."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import nn

from mixmesh.baselines import data_parallel
from mixmesh.check import check_program
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.ir import even_ratio, parse_program
from mixmesh.placement import METHODS, Space, make_grouping
from mixmesh.trace import trace
from mixmesh.verification import verify

CLUSTER = Cluster.parse("""
name = "five in three"
[network]
bandwidth_gbit_per_s = 20
latency_us = 10
[[machine]]
devices = [{ device = "V100-16GB" }, { device = "V100-16GB" }]
[[machine]]
devices = [{ device = "P100-12GB" }, { device = "T4-16GB" }]
[[machine]]
devices = ["P100-12GB"]
nic_gbit_per_s = 40
""")
COSTS = CostModel(CLUSTER)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(6, 6), nn.GELU())))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


class Tied(nn.Module):
    """A language model with one table for both ends, and labels that do not all count."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.places = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, ids, labels):
        x = self.words(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        scores = x @ self.words.weight.T
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Normed(nn.Module):
    """Statistics of the whole batch, and buffers that follow them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.again = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x, y):
        x = self.norm(self.first(x)).relu()
        x = x + self.again(self.second(x)).relu()
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), y)


class Branches(nn.Module):
    """Two ways that meet in a product and in a sum, and a penalty on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.ones(5))
        self.out = nn.Linear(5, 2)

    def forward(self, x, y):
        left, right = self.left(x).tanh(), self.right(x).sigmoid() * self.scale
        loss = (self.out(left * right + left) - y).square().mean()
        return loss + 1e-2 * self.out.weight.square().sum()


IDS = torch.arange(11 * 5).reshape(11, 5) * 7 % 20
MODELS = {
    "mlp": (Mlp, {"x": torch.randn(11, 6), "y": torch.randn(11, 6)}),
    "tied": (Tied, {"ids": IDS, "labels": IDS.masked_fill(IDS % 3 == 0, -100)}),
    "normed": (Normed, {"x": torch.randn(11, 3, 4, 4), "y": torch.arange(11) % 3}),
    "branches": (Branches, {"x": torch.randn(11, 6), "y": torch.randn(11, 2)}),
}


@cache
def traced(name: str):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make()
    return model, batch, trace(model, batch, name)


@cache
def space(name: str, method: str = "partition", count: int = 6) -> Space:
    graph = traced(name)[2].graph
    base = data_parallel(graph, COSTS, even_ratio(CLUSTER.world_size))
    return Space(base, COSTS, make_grouping(graph, COSTS, count, method))


def drawn(s: Space, seed: int):
    draw = random.Random(seed)
    return [draw.choice(s.actions(k)) for k in range(len(s.groups))]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_any_strategy_equals_the_single_device(name, seed):
    model, batch, graph = traced(name)
    program = space(name, method=list(METHODS)[seed % 2]).lower(
        drawn(space(name, list(METHODS)[seed % 2]), seed)
    )
    check_program(program)
    assert parse_program(str(program)) == program
    report = verify(model, batch, program, traced=graph, steps=3, optimizer=torch.optim.AdamW)
    assert report.ok and report.max_gradient_error_f64 < 1e-9, report
