"""Strategies of op groups: whatever is chosen for each group, the program trains as the single device."""

from __future__ import annotations

import random
import re
from functools import cache

import pytest
import torch
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.cost.exchanges import exchange_of
from mixmesh.errors import InputError
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import even_ratio, parse_program, shard_sizes, support
from mixmesh.measure.verification import verify
from mixmesh.search.baselines import data_parallel, fully_sharded, tensor_parallel
from mixmesh.search.placement import METHODS, Estimator, Placed, Space, make_grouping
from mixmesh.simulator import simulate

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
    return model, batch, trace(model, batch)


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


@pytest.mark.parametrize("make", [tensor_parallel, lambda *args: fully_sharded(data_parallel(*args))])
@pytest.mark.parametrize("name", ["tied", "branches"])
def test_programs_that_cut_more_than_samples(name, make):
    """A ratio per segment is for any program: parameters that were cut are cut by their group's ratio."""
    model, batch, graph = traced(name)
    base = make(graph.graph, COSTS, even_ratio(CLUSTER.world_size))
    s = Space(base, COSTS, space(name).grouping)
    ratios = [
        Placed((0.3, 0.1, 0.3, 0.2, 0.1)),
        Placed((0.4, 0.0, 0.2, 0.4, 0.0)),
        Placed((0.0, 0.0, 0.0, 0.0, 1.0)),
    ]
    program = s.lower([ratios[k % 3] for k in range(len(s.groups))])
    check_program(program)
    assert verify(model, batch, program, traced=graph).ok


def test_a_move_costs_what_crosses_the_fullest_link():
    """From the second device of the first machine to the last machine, half of a batch that was even."""
    program = parse_program("""program p world=5 {
      ratio r0 = [0.5, 0.5, 0, 0, 0] ratio r1 = [0.5, 0, 0, 0, 0.5]
      %x = input("x") : f32[1000, 1000] S(0)@r0
      %y = move(%x) : f32[1000, 1000] S(0)@r1
      %loss = aten.mean(%y) : f32[] P(sum)@r1
      return %loss
    }""")
    exchange = exchange_of(program, program.instructions[1])
    assert exchange.sent == ((1, 4, 0.5),) and exchange.ranks == (0, 1, 4)
    # on one link, one way, of which GPUs reach 0.7 by TCP
    latency = COSTS.collective("send", (1, 4)).latency_s
    assert exchange.seconds(COSTS) - latency == pytest.approx(0.5 * 4e6 / (0.7 * 20e9 / 8))


def test_a_move_within_an_even_batch_is_free():
    strategies = [Placed((0.5, 0.5, 0, 0, 0)), Placed((0.500001, 0.499999, 0, 0, 0))]
    s = space("mlp")
    program = s.lower([strategies[k % 2] for k in range(len(s.groups))])
    moves = [exchange_of(program, i) for i in program.instructions if i.op == "move"]
    assert moves and not any(moves)


@pytest.mark.parametrize("name", MODELS)
def test_choices_are_different_and_synchronise_what_there_is(name):
    s = space(name)
    for k, group in enumerate(s.groups):
        placed = [a.placed for a in s.actions(k)]
        assert len(set(placed)) == len(placed)
        assert {p.sync for p in placed} == (
            {"allreduce", "sharded", "ps"} if group.param_bytes else {"allreduce"}
        )
        assert {support(p.ratio) for p in placed} >= {(r,) for r in range(5)} | {tuple(range(5))}


@pytest.mark.parametrize("name", MODELS)
def test_choices_that_come_to_the_same_samples_are_one(name):
    s = space(name)
    for k in range(len(s.groups)):
        dealt = [
            (support(p.ratio), shard_sizes(s.batch, p.ratio), p.sync, p.root)
            for p in (a.placed for a in s.actions(k))
        ]
        assert len(set(dealt)) == len(dealt)
    # on equal devices proportional is even
    alone = [a for a in s.actions(0) if len(a.device_groups) == 1 and a.shares != "single"]
    assert {a.shares for a in alone} <= {"even"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_groups_follow_each_other(name, method):
    s = space(name, method)
    assert all(e.source < e.target and e.size_bytes for e in s.grouping.edges)
    operators = [n for n in s.program.graph.nodes if not n.is_leaf and n.op != "update"]
    grouped = [name for group in s.groups for name in group.nodes]
    assert len(set(grouped)) == len(grouped) and {*grouped} <= {r for n in operators for r in n.results}
    assert sum(g.param_bytes for g in s.groups) == sum(n.types[0].size_bytes for n in s.program.graph.params)
    # the two halves of the mean seconds of a device add up, however the operators are grouped
    alone = make_grouping(s.program.graph, COSTS, 1, method).groups[0]
    assert sum(g.seconds[0] for g in s.groups) == pytest.approx(alone.seconds[0])


def test_estimates_are_near_to_the_simulator():
    """Layers that are large enough for their seconds to matter beside latencies."""
    graph = layered(12, samples=4096)
    s = Space(data_parallel(graph, COSTS, even_ratio(5)), COSTS, make_grouping(graph, COSTS, 8))
    estimate = Estimator(s)
    for seed in range(8):
        actions = drawn(s, seed)
        said, timeline = estimate(actions), simulate(s.lower(actions), COSTS)
        assert said.step_s == pytest.approx(timeline.step_s, rel=0.1)
        assert said.compute_s == pytest.approx(timeline.compute_s, rel=0.05, abs=1e-5)
        assert len(said.peak_memory_bytes) == 5 and len(said.done_s) == len(s.groups)


def test_equal_layers_are_grouped_alike():
    sizes = [len(g.nodes) for g in make_grouping(layered(12), COSTS, 24).groups]
    repeated = "6, 1, " * 9  # the first layers and the end are pieces of their own
    assert repeated in ", ".join(map(str, sizes)), sizes


def layered(count: int, samples: int = 64):
    lines = ['%x0 = input("x") : f32[64, 64] R']
    for n in range(count):
        lines += [
            f'%w{n} = param("w{n}") : f32[64, 64] R',
            f"%a{n} = aten.linear(%x{n}, %w{n}) : f32[64, 64] R",
            f"%b{n} = aten.tanh(%a{n}) : f32[64, 64] R",
            f"%c{n} = aten.sigmoid(%b{n}) : f32[64, 64] R",
            f"%d{n} = aten.mul.Tensor(%b{n}, %c{n}) : f32[64, 64] R",
            f"%e{n} = aten.gelu(%d{n}) : f32[64, 64] R",
            f"%f{n} = aten.relu(%e{n}) : f32[64, 64] R",
            f"%x{n + 1} = aten.add.Tensor(%x{n}, %f{n}) : f32[64, 64] R",
        ]
    lines = [re.sub(r"(%[abcdefx].* : f32\[)64", rf"\g<1>{samples}", line) for line in lines]
    body = "\n".join([*lines, f"%loss = aten.mean(%x{count}) : f32[] R", "return %loss"])
    return parse_program("program layers world=1 {\n" + body + "\n}").graph


@pytest.mark.parametrize(
    "make",
    [
        lambda: Placed((1.0, 0.0), "gossip"),
        lambda: Placed((1.0, 0.0), "ps", 1),
        lambda: Placed((0.5, 0.5), "allreduce", 1),
        lambda: space("mlp").lower([]),
        lambda: Space(space("mlp").program, COSTS, space("tied").grouping),
        lambda: space("mlp").lower([Placed((0.5, 0.5))] * len(space("mlp").groups)),
        lambda: make_grouping(traced("mlp")[2].graph, COSTS, 0),
        lambda: make_grouping(traced("mlp")[2].graph, COSTS, 4, "names"),
    ],
)
def test_bad_strategies_are_refused(make):
    with pytest.raises(InputError, match="expected"):
        make()
